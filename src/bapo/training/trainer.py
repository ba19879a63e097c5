"""The section `trainer`: three keys of the loop, and any flag of lightning.Trainer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hydra.utils import get_class, instantiate

LOOP_KEYS = ("max_rounds", "micro_batch_tokens", "max_grad_norm")
ROUNDS = "rounds are counted: trainer.max_rounds, with schedule.epochs_per_round and schedule.minibatches_per_epoch"
OWNED = {
    "max_epochs": ROUNDS,
    "min_epochs": ROUNDS,
    "max_steps": ROUNDS,
    "min_steps": ROUNDS,
    "gradient_clip_val": "the gradient of an update is clipped once, by trainer.max_grad_norm",
    "gradient_clip_algorithm": "the gradient of an update is clipped once, by trainer.max_grad_norm",
    "accumulate_grad_batches": "a mini-batch is one update; trainer.micro_batch_tokens cuts it",
    "reload_dataloaders_every_n_epochs": "the data module is asked at every epoch; schedule decides what it returns",
    "use_distributed_sampler": "the data module deals rows to ranks itself",
    "logger": "loggers are a group of their own: logger=wandb, or +logger.NAME._target_=CLASS",
    "callbacks": "callbacks are a section of their own: +callbacks.NAME._target_=CLASS",
    "default_root_dir": "the run folder is hydra.run.dir",
}
"""Flags that the loop sets: why, and the key to use instead."""
PRECISIONS = {
    "16": "fp16 needs a gradient scaler, which the clipped update lacks",
    "bf16-true": "weights in bfloat16: policy.dtype=bfloat16",
    "bf16": "use bf16-mixed",
    "64": "losses are computed in float32",
    "transformer-engine": "token log-probs are computed in float32",
}
"""Beginnings of the precisions that the loop cannot serve, each with the reason."""
SHARDED = ("fsdp", "deepspeed", "model_parallel", "xla")
IN_PROCESS = ("spawn", "fork", "notebook")


@dataclass(frozen=True)
class TrainerOptions:
    """max_rounds: pools to train on, None where nothing is generated. micro_batch_tokens: padded tokens of a forward pass.

    max_grad_norm: the global 2-norm to which the gradient of an update is clipped. flags: everything else, Lightning's.
    """

    max_rounds: int | None
    micro_batch_tokens: int = 16384
    max_grad_norm: float = 1.0
    flags: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("max_rounds", "micro_batch_tokens"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"trainer.{name} is {value!r}; it must be an integer >= 1")
        if not isinstance(self.max_grad_norm, int | float) or not self.max_grad_norm > 0:
            raise ValueError(f"trainer.max_grad_norm is {self.max_grad_norm!r}; it must be a number > 0")
        devices = self.flags.get("devices", "auto")
        if isinstance(devices, float) or devices is False or devices == 0:
            raise ValueError(f"trainer.devices is {devices!r}; it must be a number of devices, a list of them, or auto")
        for name in OWNED.keys() & self.flags.keys():
            raise ValueError(f"trainer.{name} is {self.flags[name]!r}; the loop sets it: {OWNED[name]}")
        precision, strategy = str(self.flags.get("precision")), str(self.flags.get("strategy"))
        for begin, why in PRECISIONS.items():
            if precision.startswith(begin) and precision != "bf16-mixed":
                raise ValueError(f"trainer.precision is {precision!r}; it must be 32-true or bf16-mixed: {why}")
        if strategy.startswith(SHARDED):
            raise ValueError(f"trainer.strategy is {strategy!r}; it must keep whole weights on every rank, such as auto or ddp")
        if strategy.endswith(IN_PROCESS):
            why = "ranks are started by the command line, so that rank 0 keeps the metrics and hears signals"
            raise ValueError(f"trainer.strategy is {strategy!r}; it must be auto or ddp: {why}")

    def check(self) -> None:
        """ValueError if the machine lacks the GPUs that are asked for, or Lightning refuses a flag."""
        import torch  # not for --help

        devices, count = self.flags.get("devices", "auto"), torch.accelerator.device_count()
        if self.flags.get("accelerator") in ("gpu", "cuda") and isinstance(devices, int) and devices > count:
            raise ValueError(f"trainer.devices is {devices} with trainer.accelerator gpu; this machine has {count}")
        trainer = self.build(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy

        strategy = trainer.strategy
        if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy) or isinstance(strategy, DeepSpeedStrategy):
            name = type(strategy).__name__
            raise ValueError(f"trainer.strategy is a {name}; it must keep whole weights on every rank, such as DDPStrategy")

    @property
    def mixed_precision(self) -> bool:
        return self.flags.get("precision") == "bf16-mixed"

    @property
    def processes(self) -> int:
        """Data-parallel processes, as far as the section says."""
        devices, nodes = self.flags.get("devices", "auto"), self.flags.get("num_nodes", 1)
        if isinstance(devices, int) and devices > 0:
            return devices * nodes
        import torch  # not for --help

        return nodes * (len(devices) if isinstance(devices, list) else max(1, torch.accelerator.device_count()))

    def build(self, **owned: Any) -> Any:
        """The Trainer with these flags and what the loop owns. ValueError for what Lightning refuses."""
        try:
            make = instantiate({**self.flags, "_partial_": True}, _convert_="all")
            plugins = [*owned.pop("plugins", ()), *make.keywords.pop("plugins", ())]
            return make(**{**owned, **make.keywords}, plugins=plugins)
        except Exception as error:  # a class of its own for each of its parts
            raise ValueError(f"trainer: Lightning refuses its flags: {error}") from error


def read_trainer(section: Mapping[str, Any]) -> TrainerOptions:
    """The options of a plain section."""
    own = {name: section[name] for name in LOOP_KEYS if name in section}
    return TrainerOptions(**own, flags={name: value for name, value in section.items() if name not in own})


def unknown_flags(section: Mapping[str, Any]) -> tuple[set[str], set[str]]:
    """Keys of the section that its Trainer class does not know, and those it knows. Imports Lightning."""
    known = set(inspect.signature(get_class(section["_target_"])).parameters)
    return set(section) - known - {"_target_", *LOOP_KEYS}, (known | set(LOOP_KEYS)) - OWNED.keys()
