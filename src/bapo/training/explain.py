"""`explain=true`: what a run will do, hold in memory and download, worked out from its config before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from bapo.policy.causal_lm import DTYPES
from bapo.policy.options import PolicyOptions

LOGITS_COPIES = 5
"""float32 tensors of a chunk's logits that exist at once: logits, log-softmax, and three on the way to the entropy."""
KEPT = {"float32": (48, 16), "bf16-mixed": (41, 8), "bfloat16": (31, 8)}
"""Bytes per hidden and per intermediate unit that a layer keeps of a token for backward; counted on Qwen3, Llama keeps less."""


@dataclass(frozen=True)
class Line:
    """A number, what it is made of, and whether it counts bytes; a text where there is no number."""

    name: str
    value: int | str
    how: str
    bytes: bool = False

    def __str__(self) -> str:
        shown = self.value if isinstance(self.value, str) else f"{self.value:,}"
        if self.bytes and isinstance(self.value, int):
            power, unit = (30, "GiB") if self.value >= 2**27 else (20, "MiB") if self.value >= 2**17 else (10, "KiB")
            shown = f"{self.value / 2**power:.2f} {unit}"
        return f"  {self.name:<34} {shown:>15}   {self.how}"


@dataclass(frozen=True)
class Sizes:
    """Sizes of a policy. `parameters`: of the model without its adapter. What is held and trained: adapter included.

    widest: the larger of the residual stream (`hidden`) and the attention heads together; kv_width: key heads together.
    """

    parameters: int
    held_bytes: int
    held_float32: int
    trained: int
    trained_bytes: int
    vocabulary: int
    layers: int
    hidden: int
    widest: int
    intermediate: int
    kv_width: int
    positions: int


def explain(parts: Mapping[str, Any]) -> str:
    """The report on the built objects of a config. Fetches at most the hub's config.json of the model, and no weights."""
    policy = parts["policy"]
    sections = {"Data and updates, at most": data_lines(parts)}
    sizes = None
    try:
        config = model_config(policy, parts["task"])
        sizes = policy_sizes(policy, config)
    except Exception as error:  # no network, no such model, code of its own: each with a class of its own
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        there = "without a network: policy.path=FOLDER policy.revision=null, with the model's config.json in FOLDER"
        sections["Model"] = [Line("parameters", "unknown", reason), Line("", "", there)]
    else:
        sections["Model"] = model_lines(policy, sizes)
        sections["Memory of the trainer, on each device"] = trainer_lines(parts, sizes)
        sections["Memory of the rollout engine"] = engine_lines(parts, sizes)
    sections["Where things come from"] = source_lines(parts, sizes)
    text = [f"{parts['name']}: worked out without loading or generating anything. 1 GiB = 2^30 bytes."]
    for title, lines in sections.items():
        text += ["", title, *map(str, lines)]
    return "\n".join(text)


def data_lines(parts: Mapping[str, Any]) -> list[Line]:
    rollout, schedule, trainer = parts["rollout"], parts["schedule"], parts["trainer"]
    prompts, group, length = rollout.prompts_per_round, rollout.group_size, rollout.sampling.max_tokens
    pool, updates, each = prompts * group, schedule.updates_per_round, responses_per_update(parts)
    epochs, cut = schedule.epochs_per_round, schedule.minibatches_per_epoch
    rounds, attempts = trainer.max_rounds, rollout.max_attempts
    kept = "; fill_pool keeps all that do" if rollout.fill_pool else ""
    again = f" + replayed groups {schedule.replay.groups} * G {group}" if schedule.replay else ""
    return [
        Line("responses per round", pool, f"prompts {prompts} * G {group}"),
        Line(
            "responses generated for it", pool * attempts, f"{pool:,} * {attempts} attempts, should groups teach nothing{kept}"
        ),
        Line("response tokens per round", pool * length, f"{pool:,} * max_tokens {length:,}"),
        Line("updates per round", updates, f"E {epochs} * mini-batches {cut}"),
        Line("responses per update", each, f"({pool:,}{again}) / {cut}" if again else f"{pool:,} / {cut}"),
        Line("response tokens per update", each * length, f"{each:,} * {length:,}"),
        *staleness_lines(schedule, rollout.partial),
        Line("rounds", rounds, "trainer.max_rounds"),
        Line("updates", rounds * updates, f"{rounds:,} * {updates}"),
        Line("responses", rounds * pool, f"{rounds:,} * {pool:,}"),
    ]


def responses_per_update(parts: Mapping[str, Any]) -> int:
    """Responses of the largest mini-batch: a round's own groups and those of the replay buffer."""
    rollout, schedule = parts["rollout"], parts["schedule"]
    groups = rollout.prompts_per_round + (schedule.replay.groups if schedule.replay else 0)
    return math.ceil(groups * rollout.group_size / schedule.minibatches_per_epoch)


def staleness_lines(schedule: Any, partial: Any) -> list[Line]:
    """Updates between the weights that generated a token and those that train on it."""
    range_, start = schedule.staleness(schedule.lag), schedule.staleness(0)
    how = f"lag {schedule.lag} * {schedule.updates_per_round} updates, and up to E * mini-batches - 1 more"
    lines = [Line("staleness, in updates", f"{range_[0]} .. {range_[-1]}", how)]
    if schedule.lag:
        lines.append(
            Line("  of the first round", f"{start[0]} .. {start[-1]}", "no earlier policy yet: it rises to that by round lag")
        )
    if schedule.replay:
        earlier = schedule.replay.rounds * schedule.updates_per_round
        how = f"schedule.replay.rounds {schedule.replay.rounds} * {schedule.updates_per_round} updates more"
        lines.append(Line("  of replayed groups", f"up to {range_[-1] + earlier}", how))
    if partial:
        most = "" if partial.max_spans is None else f", by at most {partial.max_spans} policies"
        how = f"{partial.tokens_per_round} tokens a round{most}: each token has its own"
        lines.append(Line("  of responses of several rounds", "higher", how))
    if schedule.max_staleness is not None:
        lines.append(Line("  at most", schedule.max_staleness, "schedule.max_staleness: staler groups are dropped"))
    return lines


def model_config(policy: PolicyOptions, task: Any) -> Any:
    """The transformers config of the policy; for a hub model its config.json is fetched. A model's own code is never run."""
    if policy.warm_start is not None:
        return policy.warm_start.config(task)  # type: ignore[attr-defined]
    source: dict[str, Any] = {"revision": policy.revision, "trust_remote_code": False}
    with suppress(OSError):  # not here yet
        return AutoConfig.from_pretrained(str(policy.path), local_files_only=True, **source)
    return AutoConfig.from_pretrained(str(policy.path), **source)


def policy_sizes(policy: PolicyOptions, config: Any) -> Sizes:
    """Counted on the very model, adapter included, made without its numbers (on torch's meta device)."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[policy.dtype], trust_remote_code=False)
        parameters = sum(p.numel() for p in model.parameters())
        if policy.lora is not None:
            policy.lora.apply(model, seed=0)
    held = list(model.parameters())
    trained = [p for p in held if p.requires_grad]
    text = config.get_text_config()
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return Sizes(
        parameters=parameters,
        held_bytes=sum(map(_bytes, held)),
        held_float32=sum(p.numel() for p in held if p.dtype == torch.float32),
        trained=sum(p.numel() for p in trained),
        trained_bytes=sum(map(_bytes, trained)),
        vocabulary=text.vocab_size,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        widest=max(text.hidden_size, heads * head_dim),
        intermediate=text.intermediate_size,
        kv_width=(getattr(text, "num_key_value_heads", None) or heads) * head_dim,
        positions=text.max_position_embeddings,
    )


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def model_lines(policy: PolicyOptions, sizes: Sizes) -> list[Line]:
    how = "all of them" if policy.lora is None else f"LoRA, r {policy.lora.r}: r * (in + out) of every adapted matrix"
    return [
        Line("parameters", sizes.parameters, "a head tied to the embedding counts once"),
        Line("parameters in training", sizes.trained, how),
    ]


def trainer_lines(parts: Mapping[str, Any], sizes: Sizes) -> list[Line]:
    policy, trainer = parts["policy"], parts["trainer"]
    size = DTYPES[policy.dtype].itemsize
    trained = f"{sizes.trained_bytes // sizes.trained} bytes * {sizes.trained:,}"
    lines = [
        Line("weights", sizes.held_bytes, policy.dtype + ", adapters float32" * (policy.lora is not None), True),
        Line("gradients", sizes.trained_bytes, trained, True),
        Line("AdamW states", 2 * sizes.trained_bytes, f"2 * {trained}", True),
    ]
    if trainer.mixed_precision:
        lines.append(Line("bfloat16 copies", 2 * sizes.held_float32, f"2 bytes * {sizes.held_float32:,}, at an update", True))
    if trainer.processes > 1:
        lines.append(Line("buckets of DDP", sizes.trained_bytes, trained, True))
    if parts["objective"].reference_kl:
        lines.append(Line("reference model", size * sizes.parameters, f"{size} bytes * {sizes.parameters:,}", True))
    padded = _micro_batch(parts, _longest(parts, sizes))
    chunk = min(policy.chunk_tokens, padded)
    logits = 4 * chunk * sizes.vocabulary
    lines.append(Line("largest logits chunk", logits, f"4 bytes * {chunk:,} tokens * vocabulary {sizes.vocabulary:,}", True))
    lines.append(Line("copies of it", (LOGITS_COPIES - 1) * logits, f"{LOGITS_COPIES - 1}: log-softmax, entropy", True))
    mixed = trainer.mixed_precision and policy.dtype == "float32"
    per_hidden, per_intermediate = KEPT["bf16-mixed" if mixed else policy.dtype]
    layer = per_hidden * sizes.widest + per_intermediate * sizes.intermediate
    if policy.gradient_checkpointing:
        activations = padded * (sizes.layers * size * sizes.hidden + layer)
        how = f"estimate: {padded:,} tokens * ({sizes.layers} layers * {size} * {sizes.hidden:,} + one layer's {layer:,})"
    else:
        activations = padded * sizes.layers * layer
        how = f"estimate: {padded:,} tokens * {sizes.layers} layers * {layer:,} bytes"
    lines.append(Line("activations", activations, how, True))
    total = sum(line.value for line in lines if isinstance(line.value, int))
    return [*lines, Line("together", total, "and what the device itself takes", True)]


def _longest(parts: Mapping[str, Any], sizes: Sizes) -> int:
    """Tokens of the longest sequence that can occur, as far as the config says."""
    rollout = parts["rollout"]
    bounds = [sizes.positions, rollout.engine.max_model_len]
    if rollout.max_prompt_tokens is not None:
        bounds.append(rollout.max_prompt_tokens + rollout.sampling.max_tokens)
    return min(bound for bound in bounds if bound)


def _micro_batch(parts: Mapping[str, Any], longest: int) -> int:
    """Padded tokens of the largest forward pass: the budget, if there is so much data; a longer row goes by itself."""
    return max(longest, min(parts["trainer"].micro_batch_tokens, responses_per_update(parts) * longest))


def engine_lines(parts: Mapping[str, Any], sizes: Sizes) -> list[Line]:
    policy, engine = parts["policy"], parts["rollout"].engine
    dtype = engine.dtype or policy.dtype
    size = getattr(torch, dtype).itemsize
    split = engine.tensor_parallel_size
    token = 2 * sizes.layers * sizes.kv_width * size
    longest = _longest(parts, sizes)
    at_once = engine.max_num_seqs
    weights = size * sizes.parameters
    lines = [
        Line("weights", weights, f"{dtype}, {size} bytes * {sizes.parameters:,}" + f"; on {split} devices" * (split > 1), True),
        Line("KV cache of a token", token, f"2 * {sizes.layers} layers * width {sizes.kv_width:,} * {size} bytes", True),
        Line("KV cache of a sequence", token * longest, f"at full length, {longest:,} tokens", True),
        Line("KV cache of all at once", token * longest * at_once, f"* {at_once:,} sequences", True),
    ]
    if share := engine.gpu_memory_utilization:
        lines.append(Line("vLLM's share of a GPU", f"{share:.0%}", "weights first, the rest is KV cache; more sequences wait"))
        sent = sizes.trained_bytes if engine.lora_sync == "native" else weights
        if engine.weight_sync == "files":
            lines.append(Line("files of a sync", sent, f"in {engine.sync_dir or 'shared memory'}, while it lasts", True))
    return lines


def source_lines(parts: Mapping[str, Any], sizes: Sizes | None) -> list[Line]:
    policy, task = parts["policy"], parts["task"]
    if policy.warm_start is not None:
        made = f"by {type(policy.warm_start).__name__}, kept under {getattr(policy.warm_start, 'cache_dir', '')}"
        model = Line("model", "made here", made)
    else:
        stored = f", about 2 bytes * {sizes.parameters:,} if it is stored in bfloat16" if sizes else ""
        model = _source("model", str(policy.path), policy.revision, stored)
    if task.source is None:
        return [model, Line("data", "made here", type(task).__name__)]
    path, revision = task.source
    return [model, _source("data", path, revision, "")]


def _source(what: str, path: str, revision: str | None, note: str) -> Line:
    if Path(path).expanduser().exists():
        return Line(what, "local", path)
    return Line(what, "from the hub", f"{path}, revision {revision or 'newest'}{note}, unless it is in the hub's cache")
