"""Speaks like a vLLM server, without vLLM: for what an engine must do when answers are late, wrong or missing."""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import AF_INET, AF_UNIX
from socketserver import TCPServer
from typing import Any
from urllib.parse import urlsplit

Answer = dict[str, Any] | int | str
"""JSON, an HTTP status, or "reset" (the connection breaks) or "hang" (no answer)."""


def completion(body: dict[str, Any]) -> dict[str, Any]:
    """Token ids that the seed alone decides. At every step another token is likelier than the sampled one, and comes first."""
    ids = [2 + (body["seed"] // 7**step) % 7 for step in range(body["max_tokens"])]
    steps = [{"token_id:9": -0.5, f"token_id:{token}": -float(token)} for token in ids]
    choice = {"prompt_token_ids": body["prompt"], "token_ids": ids, "logprobs": {"top_logprobs": steps}}
    return {"choices": [choice | {"text": "not used", "finish_reason": "length"}]}


class Stub(ThreadingHTTPServer):
    """Serves on a free port of 127.0.0.1, or on a Unix socket, until `stop`. `calls` are the requests, by name, with bodies."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, key: str | None = None, socket: Path | None = None):
        self.address_family = AF_UNIX if socket else AF_INET
        super().__init__(str(socket) if socket else ("127.0.0.1", 0), Handler)  # type: ignore[arg-type]
        self.key = key
        self.calls: list[tuple[str, Any]] = []
        self.facts = {"version": -1, "max_model_len": 64, "dtype": "float32", "logprobs_mode": "processed_logprobs"}
        self.facts |= {"default_sampling": {}, "sleep": True, "max_lora_rank": 64}
        self.complete: Callable[[dict[str, Any]], Answer] = completion
        self.answer: Callable[[str, Any], Answer | None] = lambda name, body: None  # of any other call; None: as vLLM does
        self.load: Callable[[Path], list[int]] = lambda folder: [json.loads((folder / "sync.json").read_text())["version"]]

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's looks up a host name

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def start(self) -> Stub:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def stop(self) -> None:
        self.shutdown()
        self.server_close()

    def names(self, *, facts: bool = False) -> list[str]:
        return [name for name, _ in self.calls if facts or name != "policy_facts"]

    def bodies(self, name: str) -> list[Any]:
        return [body for called, body in self.calls if called == name]

    def respond(self, path: str, body: Any) -> Answer:
        name = body["method"] if path == "/collective_rpc" else path
        self.calls.append((name, body))
        if name == "/v1/completions":
            return self.complete(body)
        if (given := self.answer(name, body)) is not None:
            return given
        result: Any = None
        if name == "policy_facts":
            result = dict(self.facts)
        elif name == "mark_policy":
            self.facts["version"] = body["kwargs"]["version"]
        elif name == "load_policy_weights":
            result = self.load(Path(body["kwargs"]["folder"]))
        elif name == "/reset_prefix_cache":
            return {"success": True}
        if path == "/collective_rpc":  # vLLM turns other results into text
            return {"results": [result if isinstance(result, dict | list) else str(result)]}
        return {}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Stub

    def do_POST(self) -> None:
        size = int(self.headers.get("content-length", 0))
        body = json.loads(self.rfile.read(size)) if size else None
        if self.server.key is not None and self.headers.get("authorization") != f"Bearer {self.server.key}":
            self.reply(401, {})
            return
        split = urlsplit(self.path)
        answer = self.server.respond(split.path + (f"?{split.query}" if split.query else ""), body)
        if answer == "hang":
            time.sleep(60)
        elif answer == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
        elif isinstance(answer, int):
            self.reply(answer, {"error": f"no, and the header was {self.headers.get('authorization')}"})
        else:
            self.reply(200, answer)

    def reply(self, status: int, content: Any) -> None:
        payload = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *args: Any) -> None:
        pass

    def handle(self) -> None:
        with suppress(OSError, ValueError):  # the other side may have gone
            super().handle()


def main(path: str, dies_after: str = "") -> None:
    """Serve on a Unix socket as a process of its own; die after so many completions."""
    stub = Stub(socket=Path(path))
    print("started", flush=True)

    def complete(body: dict[str, Any]) -> Answer:
        if dies_after and len(stub.bodies("/v1/completions")) > int(dies_after):
            print("out of memory", flush=True)
            os._exit(1)
        return completion(body)

    stub.complete = complete
    stub.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
