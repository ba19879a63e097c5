"""A causal language model as a policy: it scores the tokens of responses and hands out its weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from bapo.ops.logprobs import token_logprobs
from bapo.ops.microbatch import cut_by_tokens
from bapo.policy.lora import adapter_of, merged_weights
from bapo.types import Adapter, Batch, TokenStats

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
        scored = batch.response_mask[:, 1:]  # token t is predicted from the hidden state of token t - 1
        logprobs, entropy = token_logprobs(
            hidden[:, :-1][scored],
            batch.input_ids[:, 1:][scored],
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
        """As `forward`, without a graph, in micro-batches of at most `token_budget` tokens, on the CPU."""
        device = next(self.parameters()).device
        logprobs = torch.zeros(batch.input_ids.shape, dtype=torch.float32)
        entropy = torch.zeros_like(logprobs)
        for rows in cut_by_tokens(batch.lengths(), token_budget):
            scores = self(batch.select(rows).to(device))
            width = scores.logprobs.shape[1]
            logprobs[rows, :width] = scores.logprobs.cpu()
            entropy[rows, :width] = scores.entropy.cpu()
        return TokenStats(logprobs, entropy)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight under its transformers name, an adapter merged into it; a tied head appears once, as the embedding."""
        return merged_weights(self.model)

    def adapter(self) -> Adapter | None:
        """The adapter in training under PEFT's names, None if the policy is trained whole. Its tensors are the policy's own."""
        return adapter_of(self.model)


def switch_off_dropout(model: nn.Module) -> None:
    """Sets every dropout to 0: with it the same weights would score a token differently in each pass, and no ratio is 1."""
    found = [m for m in model.modules() if isinstance(m, nn.Dropout) and m.p > 0]
    for dropout in found:
        dropout.p = 0.0
    functional = False
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if name.endswith("dropout") and isinstance(value, float) and value > 0:
                setattr(module, name, 0.0)
                functional = True
    config = getattr(model, "config", None)
    for name, value in list(vars(config).items()) if config is not None else []:
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float) and value > 0:
            setattr(config, name, 0.0)
            functional = True
    if found or functional:
        log.warning("the model's dropout is set to 0: importance ratios need the same network in every pass")


def checkpoint_gradients(model: Any) -> None:
    """Activations of a layer are computed again in backward instead of kept; ValueError if the model is not made for it."""
    try:
        # Reentrant checkpointing would leave frozen layers below an adapter without a graph.
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    except ValueError as error:
        raise ValueError(f"policy.gradient_checkpointing is true; {error}") from error
    model.disable_input_require_grads()  # only the reentrant kind needs it
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True  # transformers asks for it; what is inside stays in eval mode, so nothing random comes back


@contextmanager
def _loading(what: str, path: str | Path) -> Iterator[None]:
    """For what is missing or broken in a folder, the libraries raise nearly any class, up to plain Exception: ValueError."""
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"policy.path is {str(path)!r}; no {what} could be loaded from it: {reason}") from error


def load_model(path: str | Path, dtype: str = "float32", revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """A causal LM from a local folder or the hub, by transformers. Remote code runs only if asked for."""
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
    """`CausalLMPolicy` scores by the output embeddings alone; some models cap or scale their logits beyond that: ValueError."""
    ids = torch.arange(4)[None] % model.config.vocab_size
    logits = model(input_ids=ids).logits
    plain = model.get_output_embeddings()(model.base_model(input_ids=ids).last_hidden_state)
    if not torch.allclose(plain, logits, rtol=1e-2, atol=1e-2):
        raise ValueError(f"policy.path is {str(path)!r}; its logits are not its output embeddings alone (capped or scaled)")


def load_tokenizer(path: str | Path, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer beside the model; one without a pad token pads with its end-of-sequence token (masks never look at ids)."""
    with _loading("tokenizer", path):
        tokenizer = AutoTokenizer.from_pretrained(str(path), revision=revision, trust_remote_code=trust_remote_code)
    if len(tokenizer) <= len(tokenizer.added_tokens_decoder):  # made from the model's type alone, as no file was found
        raise ValueError(f"policy.path is {str(path)!r}; its tokenizer has no tokens but special ones")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
