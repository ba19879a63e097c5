"""Low-rank adapters: put into a transformers model, taken out as merged weights or as the files of an adapter."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from bapo.types import Adapter

if TYPE_CHECKING:  # PEFT takes seconds to import: a config is checked and a whole model trained without it
    from peft import LoraConfig

ADAPTER = "default"  # PEFT's name of a model's only adapter
WRAPPED = re.compile(rf"(.+)\.(base_layer|original_module|modules_to_save\.{ADAPTER}|lora_\w+\.{ADAPTER})(?:\.(\w+))?")
"""The name of a parameter in a module that PEFT has wrapped: the module, the part of the wrapper, the parameter."""


@dataclass(frozen=True)
class Lora:
    """W + alpha / r * B A in place of a matrix W; only A [r, in] and B [out, r] are trained (arXiv 2106.09685).

    target_modules: names of linear layers or embeddings, whole or what follows a dot ("q_proj"); or "all-linear": every linear
    layer but the head. modules_to_save: names, likewise, of modules that are trained themselves, in a copy. dropout: accepted
    for the sake of other projects' configs, and set to 0 with a warning, as all dropout is.
    """

    r: int
    alpha: float
    dropout: float = 0.0
    target_modules: list[str] | Literal["all-linear"] = "all-linear"
    modules_to_save: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        names: Any = self.target_modules
        twice = sorted(set(names) & set(self.modules_to_save)) if isinstance(names, list) else []
        listed = names == "all-linear" or (isinstance(names, list) and names)
        for name, ok, bound in (
            ("r", self.r >= 1, ">= 1"),
            ("alpha", 0 < self.alpha < math.inf, "> 0 and finite"),
            ("dropout", 0 <= self.dropout < 1, "in [0, 1)"),
            ("target_modules", listed, "a list of module names, or all-linear"),
            ("modules_to_save", not twice, f"without {', '.join(twice)}, which target_modules has"),
        ):
            if not ok:
                raise ValueError(f"policy.lora.{name} is {getattr(self, name)!r}; it must be {bound}")

    def apply(self, model: Any, seed: int) -> None:
        """Freezes the transformers `model` and puts an adapter into it that changes nothing yet; `seed` alone decides A.

        What is trained is float32, whatever the model is. The model keeps its class, its `base_model` and its head.
        Raises ValueError for modules that it does not have or that cannot be adapted.
        """
        from peft import get_peft_model
        from peft.utils import ModulesToSaveWrapper

        names, tied = [name for name, _ in merged_weights(model)], _tied(model)
        config = self._peft_config(model)
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")  # PEFT corrects it layer by layer
            torch.default_generator.manual_seed(seed)
            try:
                get_peft_model(model, config)
            except (ValueError, TypeError) as error:
                raise ValueError(f"policy.lora does not fit this model: {error}") from error
        for wrapper in model.modules():
            if isinstance(wrapper, ModulesToSaveWrapper):
                _train_in_float32(wrapper)
        assert _tied(model) == tied
        assert {name for name, _ in merged_weights(model)} == set(names)

    def _peft_config(self, model: Any) -> LoraConfig:
        """PEFT's config. Checks every name, as PEFT passes over one that fits nothing if another one does."""
        from peft import LoraConfig
        from transformers.pytorch_utils import Conv1D

        modules = {name: module for name, module in model.named_modules() if name}
        layers = {name for name, module in modules.items() if isinstance(module, nn.Linear | Conv1D | nn.Embedding)}
        leaves = {name for name, m in modules.items() if any(True for _ in m.parameters()) and not any(m.children())}
        targets = self.target_modules
        adapted = set() if isinstance(targets, str) else _full_names("target_modules", targets, modules, layers)
        saved = _full_names("modules_to_save", self.modules_to_save, modules, leaves)
        head, embedding = _names(model, model.get_output_embeddings()), _names(model, model.get_input_embeddings())
        shared = head | embedding if _tied(model) else set()
        if adapted & shared:
            raise ValueError(
                f"policy.lora.target_modules is {targets!r}; head and embedding of this model share one weight, which an "
                "adapter on either would split: put it into policy.lora.modules_to_save"
            )
        if keep_tied := bool(saved & shared):
            saved = saved - shared | head  # PEFT then trains one copy for both
        return LoraConfig(
            r=self.r,
            lora_alpha=self.alpha,  # type: ignore[arg-type]
            lora_dropout=self.dropout,
            target_modules=targets if isinstance(targets, str) else list(targets),
            modules_to_save=sorted(saved) or None,
            ensure_weight_tying=keep_tied,
            task_type="CAUSAL_LM",
        )


def _full_names(option: str, names: Sequence[str], modules: Iterable[str], fitting: set[str]) -> set[str]:
    """Full names of the modules that `names` match; ValueError for a name that none has, or one that does not fit."""
    full: set[str] = set()
    for name in names:
        matches = {module for module in modules if f".{module}".endswith(f".{name}")}
        if not matches or not matches <= fitting:
            ends = sorted({module.rpartition(".")[2] for module in fitting})
            reason = "cannot be used for it" if matches else "this model does not have"
            raise ValueError(f"policy.lora.{option} has {name!r}, which {reason}; it has {', '.join(ends[:20])}")
        full |= matches
    return full


def _names(model: nn.Module, target: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if module is target}


def _tied(model: Any) -> bool:
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def _train_in_float32(wrapper: Any) -> None:
    """Keeps the trained copy in float32 (bfloat16 would lose small updates); its neighbours see the model's precision."""
    copy = wrapper.modules_to_save[ADAPTER]
    dtype = next(wrapper.original_module.parameters()).dtype
    if dtype == torch.float32:
        return
    copy.float()
    copy.register_forward_pre_hook(
        lambda _, inputs: tuple(x.float() if torch.is_tensor(x) and x.is_floating_point() else x for x in inputs)
    )
    copy.register_forward_hook(lambda _, inputs, output: output.to(dtype))


def merged_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every weight under the name it has without an adapter, one at a time; `model` is never changed.

    An adapted matrix is computed in float32 and then rounded to its own dtype, once; so is a copy in modules_to_save. A weight
    that head and embedding share appears once, as the embedding.
    """
    for name, parameter in model.named_parameters():
        weight = parameter.detach()
        if match := WRAPPED.fullmatch(name):
            owner, part, last = match.groups()
            module: Any = model.get_submodule(owner)
            if part == "base_layer":
                weight = _merged(module, weight) if last == "weight" else weight
            elif part.startswith("modules_to_save"):
                weight = weight.to(module.original_module.get_parameter(last).dtype)
            else:
                continue
            name = f"{owner}.{last}"
        yield name, weight


@torch.no_grad()
def _merged(layer: Any, weight: Tensor) -> Tensor:
    if weight.is_meta:  # a model without weights, of which only names and shapes are read
        return weight
    with torch.autocast(weight.device.type, enabled=False):
        return (weight.float() + layer.get_delta_weight(ADAPTER)).to(weight.dtype)


def adapter_of(model: Any) -> Adapter | None:
    """The adapter in `model` under PEFT's names; None if there is none.

    Its tensors are the model's own, but for the second of two names of one weight: files cannot hold a weight twice.
    """
    if not any("lora_" in name for name, _ in model.named_parameters()):
        return None
    from peft.utils import get_peft_model_state_dict

    config = model.peft_config[ADAPTER].to_dict()
    config |= {"inference_mode": True, "lora_dropout": 0.0}  # it was trained without dropout
    if config["ensure_weight_tying"]:  # PEFT has taken the head off the list, but knows some embeddings only by their head
        config["modules_to_save"] = [*config["modules_to_save"], *_names(model, model.get_output_embeddings())]
    weights: dict[str, Tensor] = {}
    seen = set()
    for name, value in get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False).items():
        weights[f"base_model.model.{name}"] = value.detach().clone() if value.data_ptr() in seen else value.detach()
        seen.add(value.data_ptr())
    return Adapter(config=json.loads(json.dumps(config, default=sorted)), weights=weights)  # PEFT holds names in sets
