"""HTTP to vLLM servers that hold the same weights: calls to all of them at once."""

from __future__ import annotations

import asyncio
import ipaddress
import random
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from bapo.protocols import EngineError

BACKOFF_S = (0.5, 8.0)  # before the first retry, doubled for each further one, and the longest
CONNECT_S = 10.0
FACTS_S = 60.0  # workers answer between two steps of the model
WATCH_S = 0.5
TEXT_LIMIT = 300  # of a server's answer in a message
RPC = "/collective_rpc"
FACTS = {"method": "policy_facts"}

Result = TypeVar("Result")


class ServerFault(EngineError):
    """A request that failed: by HTTP `status`; without one nobody listens (`unreachable`) or no answer is in time (`late`)."""

    def __init__(self, message: str, status: int | None = None, unreachable: bool = False, late: bool = False):
        super().__init__(message)
        self.status = status
        self.unreachable = unreachable
        self.late = late

    @property
    def passing(self) -> bool:
        """May it go well another time?"""
        return self.status is None or self.status >= 500 or self.status in (408, 429)


class ServersGone(EngineError):
    """No server is left that could answer."""


@dataclass(frozen=True)
class ServerClient:
    """Reaches `urls`. timeout_s: of one request; concurrency: requests under way, per server; died: is it known to be gone?

    `key`, if there is one, goes along in the `Authorization` header and appears in no message.
    """

    urls: tuple[str, ...]
    key: str | None
    timeout_s: float
    max_retries: int
    concurrency: int
    died: Callable[[], bool] = lambda: False

    def __repr__(self) -> str:
        return f"ServerClient({', '.join(self.urls)})"

    @asynccontextmanager
    async def connections(self) -> AsyncIterator[httpx.AsyncClient]:
        kept = self.concurrency * len(self.urls)
        async with httpx.AsyncClient(
            headers={"Authorization": f"Bearer {self.key}"} if self.key else {},
            timeout=httpx.Timeout(None, connect=CONNECT_S),  # `send` limits the request as a whole
            # A server closes a connection that is idle for long; to find one closed just now would look like a failure.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=kept, keepalive_expiry=1.0),
            verify=ssl.create_default_context() if any(url.startswith("https:") for url in self.urls) else False,
            trust_env=not all(map(is_loopback, self.urls)),  # a proxy cannot reach this machine's own address
        ) as http:
            yield http

    async def send(self, http: httpx.AsyncClient, url: str, path: str, body: Any, timeout_s: float) -> Any:
        """The JSON answer to a POST, None to an answer of another kind. Raises ServerFault."""
        where = url + path.partition("?")[0]
        try:
            async with asyncio.timeout(timeout_s):
                answer = await http.post(url + path, json=body)
        except TimeoutError:
            raise ServerFault(f"{where}: no answer within {timeout_s:.3g} s", late=True) from None
        except httpx.HTTPError as error:
            unreachable = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            raise ServerFault(f"{where}: {type(error).__name__} {self._safe(str(error))}", unreachable=unreachable) from None
        if answer.status_code != 200:
            raise ServerFault(f"{where}: HTTP {answer.status_code} {self._safe(answer.text)}", answer.status_code)
        try:
            return answer.json() if "json" in answer.headers.get("content-type", "") else None
        except ValueError:
            raise ServerFault(f"{where}: an answer that is no JSON: {self._safe(answer.text)}", answer.status_code) from None

    def _safe(self, text: str) -> str:
        return (text.replace(self.key, "***") if self.key else text)[:TEXT_LIMIT]

    def call(
        self,
        path: str,
        body: Any = None,
        timeout_s: float | None = None,
        urls: Sequence[str] | None = None,
        attempts: int | None = None,
    ) -> dict[str, Any]:
        """POSTs to all `urls` at once (None: every one). Url -> JSON answer, or the ServerFault that came instead.

        A connection that breaks is tried again, up to `attempts` in all (None: `max_retries` + 1); an answer is one, be it 500.
        """
        chosen = self.urls if urls is None else urls
        limit, most = timeout_s or self.timeout_s, attempts or self.max_retries + 1

        async def call_all() -> list[Any]:
            async with self.connections() as http:
                return await asyncio.gather(*(self._call_one(http, url, path, body, limit, most) for url in chosen))

        return dict(zip(chosen, self.run(call_all()), strict=True))

    async def _call_one(self, http: httpx.AsyncClient, url: str, path: str, body: Any, timeout_s: float, attempts: int) -> Any:
        for attempt in range(attempts):
            try:
                return await self.send(http, url, path, body, timeout_s)
            except ServerFault as fault:
                gone = self.died() or (fault.unreachable and len(self.urls) > 1)
                if fault.status is not None or fault.late or gone or attempt + 1 == attempts:
                    return fault
            await asyncio.sleep(backoff(attempt))
        raise AssertionError("attempts is 0")

    def facts(
        self, urls: Sequence[str] | None = None, timeout_s: float | None = None, attempts: int | None = None
    ) -> dict[str, Any]:
        """Url -> what `PolicyWorker.policy_facts` says in each of its workers, or the ServerFault that came instead."""
        answers = self.call(RPC, FACTS, timeout_s or min(self.timeout_s, FACTS_S), urls, attempts)
        return {
            url: answer if isinstance(answer, ServerFault) else _facts(answer) or ServerFault(f"{url}{RPC}: no facts", 200)
            for url, answer in answers.items()
        }

    def there(self, attempts: int | None = None) -> bool:
        """Does a server answer, and do its workers?"""
        try:
            facts = self.facts(timeout_s=CONNECT_S, attempts=attempts)
        except ServersGone:
            return False
        return any(not isinstance(answer, ServerFault) for answer in facts.values())

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs it to its end, in a thread of its own where this one runs an event loop already, as a notebook's does.

        Raises ServersGone when the server dies meanwhile: without its workers it can leave a request open for ever.
        """

        async def watched() -> Result:
            task = asyncio.ensure_future(work)
            try:
                while not (await asyncio.wait([task], timeout=WATCH_S))[0]:
                    if self.died():
                        raise ServersGone("processes of the server have ended")
                return task.result()
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(watched())
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(asyncio.run, watched()).result()


def _facts(answer: Any) -> list[dict[str, Any]]:
    """The workers' facts in an answer, [] if it holds something else."""
    found = answer.get("results") if isinstance(answer, dict) else None
    if not isinstance(found, list):
        return []
    return found if all(isinstance(facts, dict) and isinstance(facts.get("version"), int) for facts in found) else []


def backoff(attempt: int) -> float:
    """Seconds before the next attempt, spread so that requests which failed together do not come back together."""
    first, longest = BACKOFF_S
    return min(first * 2**attempt, longest) * random.SystemRandom().uniform(0.5, 1.0)  # no seeded generator is touched


def is_loopback(url: str) -> bool:
    """Does the url name this machine's own address, which no other machine can reach?"""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
