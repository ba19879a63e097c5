"""Brings the policy's weights to vLLM servers over HTTP, and knows which server holds which."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bapo.engines.client import RPC, ServerClient, ServerFault, ServersGone
from bapo.engines.options import VLLMOptions
from bapo.engines.weight_files import write_adapter, write_weights
from bapo.engines.weight_transfer import WeightTransfer
from bapo.protocols import EngineError
from bapo.types import Adapter

log = logging.getLogger(__name__)

RESET_S = 10.0  # how long requests that were given up may hold on to the prefix cache


class ServerWeights:
    """What the servers of `client` hold: asleep or awake, the weights of policy `version` or, at -1, no complete set.

    `prepare` or `prepare_adapter`, then `update`, which can be repeated for a server that was started again: the files stay in
    `folder` until the next ones. Raises ServerFault where a server says no, ServersGone where none answers.
    """

    def __init__(self, options: VLLMOptions, client: ServerClient, folder: Path, dtype: torch.dtype):
        self.options = options
        self.client = client
        self.folder = folder
        self.dtype = dtype
        self.version = -1
        self.adapter: str | None = None  # the name that completions ask for
        self.asleep = False
        self._transfer = WeightTransfer(options, self._rpc) if options.weight_sync == "nccl" else None
        self._source: Path | None = None
        self._push: Callable[[], None] | None = None
        self._next = -1  # the version that `_push` brings
        self._reached: list[str] = []  # the servers that take part in the update under way

    def prepare(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.forget()
        self._next = version
        if (transfer := self._transfer) is not None:
            self._push = lambda: transfer.send(weights)
        else:
            self._source = write_weights(self.folder, weights, version, self.dtype)
            self._push = self._take_weights

    def prepare_adapter(self, adapter: Adapter, version: int) -> None:
        self.forget()
        self._next = version
        self._source = write_adapter(self.folder, adapter, version)
        self._push = self._take_adapter

    def forget(self) -> None:
        """Old weights need not lie in memory while new ones are written; half of either serves nobody."""
        self.version = -1
        self.release()

    def release(self) -> None:
        """The servers have them; nothing will be repeated."""
        self._push = self._source = None
        for left in filter(Path.is_dir, self.folder.iterdir()):  # half-written ones too
            shutil.rmtree(left, ignore_errors=True)

    def set_version(self, version: int) -> None:
        """Another process has brought the servers the weights of this version."""
        self.version = version
        self.adapter = _adapter_name(version) if self.options.lora_sync == "native" else None

    @property
    def repeatable(self) -> bool:
        """Can `update` be done again?"""
        return self._source is not None

    def update(self) -> None:
        """Wakes the servers to take weights; when all are there the cache of the old ones is dropped, and they are marked."""
        assert self._push is not None, "prepare first"
        self.version = -1
        self._reached = list(self.client.urls)
        if self.asleep:
            self._everywhere("/wake_up?tags=weights")
        self._rpc("mark_policy", {"version": -1})
        self._push()
        if self.asleep:
            self._everywhere("/wake_up?tags=kv_cache")
            self.asleep = False
        self._reset_prefix_cache()
        self._rpc("mark_policy", {"version": self._next})
        self.version = self._next

    def _take_weights(self) -> None:
        for url, workers in self._rpc("load_policy_weights", {"folder": str(self._source)}).items():
            for found, _ in workers:
                if found != self._next:
                    raise EngineError(f"{url} took version {found} of the weights, not {self._next}")
        self.adapter = None  # one that is merged into them, or of weights before

    def _take_adapter(self) -> None:
        name, old = _adapter_name(self._next), self.adapter
        for known in {name, old or name}:  # a server that has `name` already would keep what it has
            self.client.call("/v1/unload_lora_adapter", {"lora_name": known}, urls=self._reached)  # 404 where it is unknown
        self._everywhere("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(self._source)})
        self.adapter = name

    def _reset_prefix_cache(self) -> None:
        deadline = time.monotonic() + RESET_S
        while not all((answer or {}).get("success") for answer in self._everywhere("/reset_prefix_cache").values()):
            if time.monotonic() > deadline:
                raise EngineError("a server still has requests of the weights before: its prefix cache could not be reset")
            time.sleep(0.2)

    def sleep(self) -> None:
        """Frees the servers' GPU memory until the next `update`, if they were configured to."""
        if self.options.sleeps and not self.asleep:
            self._reached = list(self.client.urls)
            self._everywhere(f"/sleep?level={self.options.sleep_level}")
            self.asleep = True

    def _everywhere(self, path: str, body: Any = None) -> dict[str, Any]:
        """POSTs to every server that takes part: url -> answer. A server that gives none is left out from then on."""
        answers = self.client.call(path, body, self.options.timeout_s, self._reached)
        faults = {url: answer for url, answer in answers.items() if isinstance(answer, ServerFault)}
        for url, fault in faults.items():
            if fault.status is not None:
                raise fault
            self._reached.remove(url)
            log.warning("%s; %d servers go on", fault, len(self._reached))
        if not self._reached:
            raise ServersGone("; ".join(map(str, faults.values())))
        return {url: answers[url] for url in self._reached}

    def _rpc(self, method: str, kwargs: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Calls a method of the workers of every server that takes part: url -> what each worker returned."""
        answers = self._everywhere(RPC, {"method": method, "kwargs": dict(kwargs), "timeout": self.options.timeout_s})
        return {url: (answer or {}).get("results", []) for url, answer in answers.items()}

    def holders(self) -> list[str]:
        """The servers that hold the weights of `version` now."""
        found = self._versions()
        holders = [url for url, version in found.items() if version == self.version]
        others = "; ".join(
            str(v) if isinstance(v, ServerFault) else f"{u} holds {v}" for u, v in found.items() if u not in holders
        )
        if not holders:
            raise ServersGone(f"no server holds policy version {self.version}: {others}")
        if others:
            log.warning("servers are passed over, as they do not hold policy version %d: %s", self.version, others)
        return holders

    def check_kept(self, urls: Sequence[str]) -> None:
        """EngineError if one of them holds other weights by now: it may have drawn from those."""
        for url, version in self._versions(urls).items():
            if isinstance(version, int) and version != self.version:
                raise EngineError(f"{url} held policy version {self.version} and now holds {version}: somebody else loads it")

    def _versions(self, urls: Sequence[str] | None = None) -> dict[str, int | ServerFault]:
        found: dict[str, int | ServerFault] = {}
        for url, answer in self.client.facts(urls).items():
            found[url] = answer if isinstance(answer, ServerFault) else min(worker["version"] for worker in answer)
        return found


def _adapter_name(version: int) -> str:
    return f"policy-{version}"
