"""A causal language model as a policy: log-probs of response tokens, and its weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bapo.ops.logprobs import token_logprobs
from bapo.ops.microbatch import cut_by_tokens
from bapo.policy.lora import adapter_of, merged_weights
from bapo.types import Adapter, Batch, TokenStats

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class CausalLMPolicy(nn.Module):
    """pi(y_t | x, y_<t) at the sampling `temperature`, from any transformers causal LM."""

    def __init__(self, model: PreTrainedModel, temperature: float = 1.0, chunk_tokens: int = 4096):
        super().__init__()
        if temperature <= 0:
            raise ValueError(f"rollout.sampling.temperature is {temperature}; training needs > 0")
        self.model = model
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens
        switch_off_dropout(model)

    def forward(self, batch: Batch, entropy_graph: bool = False) -> TokenStats:
        """TokenStats of the response tokens of `batch` [B, T]; no other position is ever projected to the vocabulary."""
        hidden = self.model.base_model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask.long(), use_cache=False
        ).last_hidden_state
        mask = batch.response_mask[:, 1:]  # token t is predicted from the hidden state of token t - 1
        logprobs, entropy = token_logprobs(
            hidden[:, :-1][mask],
            batch.input_ids[:, 1:][mask],
            self.model.get_output_embeddings(),
            self.temperature,
            self.chunk_tokens,
            entropy_graph,
        )
        blank = torch.zeros(batch.input_ids.shape, dtype=torch.float32, device=hidden.device)
        return TokenStats(
            logprobs=blank.masked_scatter(batch.response_mask, logprobs),
            entropy=blank.masked_scatter(batch.response_mask, entropy),
        )

    @torch.no_grad()
    def token_stats(self, batch: Batch, token_budget: int) -> TokenStats:
        """TokenStats as of `forward`, on the CPU, without a graph, in micro-batches of at most `token_budget` tokens."""
        device = next(self.parameters()).device
        logprobs = torch.zeros(batch.input_ids.shape, dtype=torch.float32)
        entropy = torch.zeros_like(logprobs)
        for rows in cut_by_tokens(batch.lengths(), token_budget):
            stats = self(batch.select(rows).to(device))
            width = stats.logprobs.shape[1]
            logprobs[rows, :width] = stats.logprobs.cpu()
            entropy[rows, :width] = stats.entropy.cpu()
        return TokenStats(logprobs, entropy)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its transformers name, an adapter merged into it; a tied head appears once, as the embedding."""
        return merged_weights(self.model)

    def adapter(self) -> Adapter | None:
        """The adapter in training under PEFT's names, None if the policy is trained whole; the tensors are the policy's own."""
        return adapter_of(self.model)


def switch_off_dropout(model: nn.Module) -> None:
    """Sets every dropout to 0, with a warning: with it the same weights would give a token another log-prob in each pass."""
    changed = False
    for holder in [*model.modules(), getattr(model, "config", None)]:
        if isinstance(holder, nn.Dropout) and holder.p > 0:
            holder.p, changed = 0.0, True
        for name, value in list(vars(holder).items()) if holder is not None else ():
            dropout = name.endswith("dropout") or (not isinstance(holder, nn.Module) and ("dropout" in name or "pdrop" in name))
            if dropout and isinstance(value, float) and value > 0:
                setattr(holder, name, 0.0)
                changed = True
    if changed:
        log.warning("the model's dropout is set to 0: importance ratios need the same network in every pass")


def checkpoint_gradients(model: Any) -> None:
    """Has each layer's activations computed again in backward instead of kept; ValueError for a model not made for it."""
    try:
        # Reentrant checkpointing would leave frozen layers below an adapter without a graph.
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    except ValueError as error:
        raise ValueError(f"policy.gradient_checkpointing is true; {error}") from error
    model.disable_input_require_grads()  # only the reentrant kind needs it
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True  # transformers requires it; the modules inside stay in eval mode, so nothing random returns


@contextmanager
def _loading(part: str, path: str | Path) -> Iterator[None]:
    """Turns any error inside into a ValueError: for a broken folder the libraries raise nearly any class."""
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"policy.path is {str(path)!r}; no {part} could be loaded from it: {reason}") from error


def load_model(path: str | Path, dtype: str = "float32", revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """A causal LM from a local folder or the hub, by transformers. Remote code runs only with `trust_remote_code`."""
    from transformers import AutoModelForCausalLM

    if dtype not in DTYPES:
        raise ValueError(f"policy.dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    if trust_remote_code:
        log.warning("policy.trust_remote_code is on: code from %s will run", path)
    with _loading("model", path):
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(path), dtype=DTYPES[dtype], revision=revision, trust_remote_code=trust_remote_code
        )
    check_head(model, path)
    return model


@torch.no_grad()
def check_head(model: Any, path: str | Path) -> None:
    """Raises ValueError for a model that caps or scales its logits: `CausalLMPolicy` uses the output embeddings alone."""
    ids = torch.arange(4)[None] % model.config.vocab_size
    logits = model(input_ids=ids).logits
    plain = model.get_output_embeddings()(model.base_model(input_ids=ids).last_hidden_state)
    if not torch.allclose(plain, logits, rtol=1e-2, atol=1e-2):
        raise ValueError(f"policy.path is {str(path)!r}; its logits are not its output embeddings alone (capped or scaled)")


def load_tokenizer(path: str | Path, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of the model; one without a pad token pads with its end-of-sequence token (masks never look at ids)."""
    from transformers import AutoTokenizer

    with _loading("tokenizer", path):
        tokenizer = AutoTokenizer.from_pretrained(str(path), revision=revision, trust_remote_code=trust_remote_code)
    if len(tokenizer) <= len(tokenizer.added_tokens_decoder):  # made from the model's type alone, as no file was found
        raise ValueError(f"policy.path is {str(path)!r}; its tokenizer has no tokens but special ones")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
