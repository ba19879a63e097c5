"""vLLM's own weight transfer, `ipc` (trainer and engine on one GPU) or `nccl` (over a network), behind `load_weights`."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor


class WeightTransfer:
    """Sends weights to an engine whose workers are reached by `rpc`(method, keyword arguments) -> their answers.

    The rendezvous with the workers is made at the first `send`. Needs a GPU.
    """

    def __init__(self, options: Any, rpc: Callable[[str, Mapping[str, Any]], Any], replicas: int = 1):
        self.backend = options.weight_sync
        self.world_size = 1 + replicas * options.tensor_parallel_size
        self.client = SyncClient(rpc)
        self._engine: Any = None
        self._source: Any = None

    def send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        # A list, as names and shapes are sent before the values. Of a merged LoRA policy it is a second copy of the weights.
        given = list(weights)
        if self._engine is None:
            self._engine, self._source = self._connect(given)
        self._source.weights = given
        self._engine.send_weights()
        self._source.weights = []
        self.client.rpc("repack_heads", {})

    def _connect(self, weights: list[tuple[str, Tensor]]) -> tuple[Any, Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        class PolicySource(WeightSource):
            def __init__(self) -> None:
                self.weights = weights

            def metadata(self) -> list[Any]:
                return [ParamMeta(name, value.dtype, tuple(value.shape)) for name, value in self.weights]

            def __iter__(self) -> Any:
                return iter(self.weights)

        source = PolicySource()
        info: Any
        if self.backend == "ipc":
            info = IPCTrainerInitInfo(rank=0, packed=True)
        else:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            info = NCCLTrainerInitInfo(rank=0, master_address="127.0.0.1", master_port=port, world_size=self.world_size)
        return WeightTransferTrainerFactory.trainer_init(info, client=self.client, source=source), source


class SyncClient:
    """What vLLM's trainer side asks of an engine, all of it by remote calls to the workers."""

    def __init__(self, rpc: Callable[[str, Mapping[str, Any]], Any]):
        self.rpc = rpc

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.rpc("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self.rpc("start_weight_update", {})

    def update_weights(self, update_info: Any) -> None:
        self.rpc("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.rpc("finish_weight_update", {})
