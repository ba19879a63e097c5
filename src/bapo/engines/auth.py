"""A key on every route of a vLLM server, for its `--middleware`: its own `--api-key` leaves the control routes open."""

from __future__ import annotations

import os
import secrets
from collections.abc import MutableMapping
from typing import Any

KEY_VARIABLE = "BAPO_VLLM_KEY"  # where the server finds its key
MIDDLEWARE = "bapo.engines.auth.KeyOnEveryRoute"
MAX_BODY_BYTES = 16 << 20  # a prompt of a million tokens is 7 MB of JSON


class KeyOnEveryRoute:
    """ASGI middleware that answers 401 on any route to a request without `Authorization: Bearer KEY`.

    The key is the environment variable `KEY_VARIABLE`; if it is not set, every request is refused. With the right key, bodies
    above `MAX_BODY_BYTES` or of unknown size get 413 or 411, bodies that are not JSON 400, and web sockets are closed.
    """

    def __init__(self, app: Any):
        self.app = app
        self.key = os.environ.get(KEY_VARIABLE, "").encode()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        elif status := self._refusal(scope):
            await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
        else:
            await self.app(scope, receive, send)

    def _refusal(self, scope: MutableMapping[str, Any]) -> int | None:
        """Return the HTTP status to refuse a request with, None for a good one."""
        headers = {name.lower(): value for name, value in scope["headers"]}
        credentials = headers.get(b"authorization", b"")
        if not self.key or not secrets.compare_digest(credentials, b"Bearer " + self.key):
            return 401
        if b"transfer-encoding" in headers:
            return 411
        size = headers.get(b"content-length", b"0")
        if not size.isdigit():
            return 400
        if int(size) > MAX_BODY_BYTES:
            return 413
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        return 400 if int(size) and kind != b"application/json" else None
