"""HTTP to vLLM servers that hold the same weights, over TCP or a Unix socket."""

from __future__ import annotations

import asyncio
import ipaddress
import random
import ssl
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

BACKOFF_S = (0.5, 8.0)  # before the first retry, doubled for each further one, and the longest
CONNECT_S = 10.0
FACTS_S = 60.0  # workers answer between two steps of the model
TEXT_LIMIT = 300  # of a server's answer in a message
COMPLETIONS = "/v1/completions"
RPC = "/collective_rpc"

Result = TypeVar("Result")


class ServerFault(RuntimeError):
    """A request that failed: `status` of the HTTP answer, None if no answer came; late: if none came in time."""

    def __init__(self, message: str, status: int | None = None, late: bool = False):
        super().__init__(message)
        self.status = status
        self.late = late


@dataclass(frozen=True)
class ServerClient:
    """Reaches `urls`; with `socket`, the one url is only a name. timeout_s: of one request; concurrency: per server.

    A request is repeated up to `max_retries` times, with growing pauses, after a broken connection, and a completion also after
    5xx, 408 and 429; never after a timeout. `key` goes into the `Authorization` header and appears in no message.
    """

    urls: tuple[str, ...]
    timeout_s: float
    max_retries: int
    concurrency: int
    key: str | None = field(default=None, repr=False)
    socket: str | None = None

    def call(self, path: str, body: Any = None, timeout_s: float | None = None) -> dict[str, Any]:
        """POST to every server at once. Returns url -> JSON answer, or the ServerFault that came instead."""

        async def one(http: httpx.AsyncClient, url: str) -> Any:
            try:
                return await self._post(http, url, path, body, timeout_s or self.timeout_s)
            except ServerFault as fault:
                return fault

        async def every() -> list[Any]:
            async with self._connections() as http:
                return await asyncio.gather(*(one(http, url) for url in self.urls))

        return dict(zip(self.urls, run(every()), strict=True))

    def facts(self) -> dict[str, Any]:
        """Return url -> what `PolicyWorker.policy_facts` says in each of its workers, or the ServerFault that came instead."""
        answers = self.call(RPC, {"method": "policy_facts"}, min(self.timeout_s, FACTS_S))
        return {url: _checked_facts(url, answer) for url, answer in answers.items()}

    def complete(self, bodies: Sequence[Mapping[str, Any]]) -> list[Any]:
        """POST completions, spread over the servers. Returns JSON answers, or the ServerFault of one that was refused.

        Raises ServerFault if a server gives no answer to one of them.
        """
        slots = asyncio.Semaphore(self.concurrency * len(self.urls))

        async def one(http: httpx.AsyncClient, url: str, body: Any) -> Any:
            async with slots:  # kept for the retries: they do not queue behind requests that have not begun
                try:
                    return await self._post(http, url, COMPLETIONS, body, self.timeout_s)
                except ServerFault as fault:
                    if fault.status is None:
                        raise
                    return fault

        async def every() -> list[Any]:
            urls = (self.urls[index % len(self.urls)] for index in range(len(bodies)))
            async with self._connections() as http, asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(http, url, body)) for url, body in zip(urls, bodies, strict=True)]
            return [task.result() for task in tasks]

        try:
            return run(every())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def _connections(self) -> httpx.AsyncClient:
        # A server closes a connection that is idle for long; to meet one closed just now would look like a failure.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=1.0)
        secure = any(url.startswith("https:") for url in self.urls)
        return httpx.AsyncClient(
            headers={"Authorization": f"Bearer {self.key}"} if self.key else {},
            timeout=httpx.Timeout(None, connect=CONNECT_S),  # `_send` limits the request as a whole
            limits=limits,
            verify=ssl.create_default_context() if secure else False,
            transport=httpx.AsyncHTTPTransport(uds=self.socket, limits=limits) if self.socket else None,
            trust_env=not all(map(is_loopback, self.urls)),  # a proxy cannot reach this machine's own address
        )

    async def _post(self, http: httpx.AsyncClient, url: str, path: str, body: Any, timeout_s: float) -> Any:
        for attempt in range(self.max_retries + 1):
            try:
                return await self._send(http, url, path, body, timeout_s)
            except ServerFault as fault:
                busy = path == COMPLETIONS and fault.status and (fault.status >= 500 or fault.status in (408, 429))
                if fault.late or (fault.status and not busy) or attempt == self.max_retries:
                    raise
            first, longest = BACKOFF_S  # spread, so that requests which failed together do not come back together
            await asyncio.sleep(min(first * 2**attempt, longest) * random.SystemRandom().uniform(0.5, 1.0))
        raise AssertionError("unreachable")

    async def _send(self, http: httpx.AsyncClient, url: str, path: str, body: Any, timeout_s: float) -> Any:
        """Return the JSON answer to a POST, None for an answer of another kind. Raises ServerFault."""
        where = (self.socket or url) + path.partition("?")[0]
        try:
            async with asyncio.timeout(timeout_s):
                answer = await http.post(url + path, json=body)
        except TimeoutError:
            raise ServerFault(f"{where}: no answer within {timeout_s:.3g} s", late=True) from None
        except httpx.HTTPError as error:
            raise ServerFault(f"{where}: {type(error).__name__} {self._safe(str(error))}") from None
        if answer.status_code != 200:
            raise ServerFault(f"{where}: HTTP {answer.status_code} {self._safe(answer.text)}", answer.status_code)
        try:
            return answer.json() if "json" in answer.headers.get("content-type", "") else None
        except ValueError:
            raise ServerFault(f"{where}: an answer that is no JSON: {self._safe(answer.text)}", answer.status_code) from None

    def _safe(self, text: str) -> str:
        return (text.replace(self.key, "***") if self.key else text)[:TEXT_LIMIT]


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine to its end, in a thread of its own where this one has an event loop already, as a notebook's does."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


def _checked_facts(url: str, answer: Any) -> Any:
    if isinstance(answer, ServerFault):
        return answer
    workers = answer.get("results") if isinstance(answer, dict) else None
    if not workers or not all(isinstance(facts, dict) and isinstance(facts.get("version"), int) for facts in workers):
        return ServerFault(f"{url}{RPC}: the answer is not that of the worker extension", 200)
    return workers


def is_loopback(url: str) -> bool:
    """Tell if the url names this machine's own address, which no other machine can reach."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
