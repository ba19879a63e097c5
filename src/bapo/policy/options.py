"""The options of a policy, the fields of conf/policy."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bapo.policy.causal_lm import CausalLMPolicy

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class PolicyOptions:
    """A model folder or hub id (`path`, with `revision`), or a small model made here by `warm_start`(task): exactly one.

    A `~` in front of `path` is expanded. `chunk_tokens`: tokens whose logits exist at a time. With `lora`, adapters are trained
    instead of the model. `gradient_checkpointing`: activations are computed again in backward instead of kept.
    """

    path: str | None = None
    warm_start: Callable[[Any], Path] | None = None
    revision: str | None = None
    dtype: str = "float32"
    trust_remote_code: bool = False
    chunk_tokens: int = 4096
    lora: Any = None  # a bapo.policy.lora.Lora
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        if (self.path is None) == (self.warm_start is None):
            given = "null" if self.warm_start is None else "given"
            raise ValueError(f"policy.path is {self.path!r} and policy.warm_start is {given}; exactly one must be given")
        if self.dtype not in DTYPES:
            raise ValueError(f"policy.dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}")
        if self.chunk_tokens < 1:
            raise ValueError(f"policy.chunk_tokens is {self.chunk_tokens}; it must be >= 1")
        if isinstance(self.lora, dict):
            raise ValueError(f"policy.lora is {self.lora!r}, without a _target_; +policy/lora=default makes it")
        if self.path is None:
            return
        local = self.path.startswith((".", "/", "~")) or Path(self.path).exists()
        path = os.path.expanduser(self.path)
        if local and not (Path(path) / "config.json").is_file():
            raise ValueError(f"policy.path is {self.path!r}; there is no config.json in that folder")
        object.__setattr__(self, "path", path)

    @property
    def source(self) -> dict[str, Any]:
        """Arguments that go with a path wherever something is loaded from it."""
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}

    def model_path(self, task: Any) -> str | Path:
        """Folder or hub id of the model: `path`, or the folder that `warm_start` makes for `task`."""
        return self.path if self.warm_start is None else self.warm_start(task)  # type: ignore[return-value]

    def load(self, path: str | Path, temperature: float, seed: int) -> CausalLMPolicy:
        """The policy before its first update, on the CPU, from the model at `path`; `seed` decides a new adapter."""
        from bapo.policy.causal_lm import CausalLMPolicy, checkpoint_gradients, load_model

        model = load_model(path, self.dtype, **self.source)
        if self.lora is not None:
            self.lora.apply(model, seed)
        if self.gradient_checkpointing:
            checkpoint_gradients(model)
        return CausalLMPolicy(model, temperature, self.chunk_tokens)

    def load_reference(self, path: str | Path, temperature: float) -> CausalLMPolicy:
        """The frozen reference policy: the policy before its first update."""
        return replace(self, lora=None, gradient_checkpointing=False).load(path, temperature, seed=0)
