"""A policy with the weights that it has at one moment, while training changes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor

from bapo.protocols import PolicyHandle
from bapo.types import Adapter, Batch, TokenStats


class PolicySnapshot:
    """A PolicyHandle on `policy` with its present weights, which are copied to the CPU.

    parameters: those of `policy` that training changes.
    """

    def __init__(self, policy: PolicyHandle, parameters: Iterable[Tensor]):
        self._policy, self._version = policy, policy.version()
        self._weights = [(parameter, parameter.detach().to("cpu", copy=True)) for parameter in parameters]

    def version(self) -> int:
        return self._version

    def token_stats(self, batch: Batch) -> TokenStats:
        with self._in_place():
            return self._policy.token_stats(batch)

    def reference_logprobs(self, batch: Batch) -> Tensor:
        return self._policy.reference_logprobs(batch)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        with self._in_place():
            yield from self._policy.named_weights()

    def adapter(self) -> Adapter | None:
        with self._in_place():
            return self._policy.adapter()

    def snapshot(self) -> PolicySnapshot:
        return self

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Puts the snapshot's weights into the policy. Afterwards the policy has the very tensors that it had before."""
        current = [parameter.data for parameter, _ in self._weights]
        try:
            for parameter, weight in self._weights:
                parameter.data = weight.to(parameter.device)
            yield
        finally:
            for (parameter, _), tensor in zip(self._weights, current, strict=True):
                parameter.data = tensor
