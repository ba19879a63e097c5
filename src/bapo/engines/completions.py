"""Completions drawn from several vLLM servers at once: spread evenly, tried again, passed on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import httpx

from bapo.engines.client import CONNECT_S, FACTS, RPC, ServerClient, ServerFault, ServersGone, backoff


class Completions:
    """A batch of completion requests under way. Each begins at one of `members` and goes on to the next where that fails.

    `answers` and `failures` (for good) are by the requests' keys; `retries` counts further attempts. Of several members, one
    that cannot be reached, or has answered nobody while a request waited in vain, is passed over from then on.
    """

    def __init__(self, client: ServerClient, members: Sequence[str]):
        self.client = client
        self.members = list(members)
        self.answers: dict[int, Any] = {}
        self.failures: dict[int, ServerFault] = {}
        self.retries = 0
        self._slots = asyncio.Semaphore(client.concurrency * len(members))
        self._heard = dict.fromkeys(members, -1.0)  # when each answered last

    async def draw(self, bodies: Mapping[int, Any]) -> None:
        """Returns when each is answered or has failed for good. Raises ServersGone; what has been answered by then stays."""
        async with self.client.connections() as http:
            tasks = [asyncio.create_task(self._one(http, key, body)) for key, body in bodies.items()]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
                for task in done:
                    task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, http: httpx.AsyncClient, key: int, body: Any) -> None:
        async with self._slots:  # kept until the end: a retry does not queue behind requests that have not begun
            await self._attempts(http, key, body)

    async def _attempts(self, http: httpx.AsyncClient, key: int, body: Any) -> None:
        attempt = 0
        deadline = time.monotonic() + self.client.timeout_s * (self.client.max_retries + 1)
        while True:
            url, now = self.members[(key + attempt) % len(self.members)], time.monotonic()
            try:
                limit = max(min(self.client.timeout_s, deadline - now), 0.01)
                self.answers[key] = await self.client.send(http, url, "/v1/completions", body, limit)
                self._heard[url] = time.monotonic()
                return
            except ServerFault as fault:
                failure = fault
            if not failure.passing:
                self._heard[url] = time.monotonic()
                self.failures[key] = failure
                return
            if self.client.died():
                raise ServersGone(str(failure))
            if self._passed_over(url, failure, since=now) and failure.unreachable:
                self.retries += 1
                continue
            pause = backoff(attempt)
            attempt += 1
            if attempt > self.client.max_retries or time.monotonic() + pause > deadline:
                if not await self._anybody_there(http):
                    raise ServersGone(f"{failure} (attempt {attempt})")
                self.failures[key] = failure
                return
            self.retries += 1
            await asyncio.sleep(pause)

    def _passed_over(self, url: str, failure: ServerFault, since: float) -> bool:
        hangs = failure.late and self._heard[url] < since
        if url in self.members and len(self.members) > 1 and (failure.unreachable or hangs):
            self.members.remove(url)
        return url not in self.members

    async def _anybody_there(self, http: httpx.AsyncClient) -> bool:
        """Is it the request that fails, or are the servers gone? Asks their workers, as a server can outlive those."""
        for url in list(self.members):
            with suppress(ServerFault):
                await self.client.send(http, url, RPC, FACTS, min(self.client.timeout_s, CONNECT_S))
                return True
        return False
