"""Log-probs and entropies of given tokens without ever holding all logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Head = Callable[[Tensor], Tensor]


def token_logprobs(
    hidden: Tensor,
    targets: Tensor,
    head: Head,
    temperature: float = 1.0,
    chunk_tokens: int = 4096,
    entropy_graph: bool = False,
) -> tuple[Tensor, Tensor]:
    """log softmax(head(hidden) / temperature)[target] and the entropy of that distribution, per token.

    hidden: [N, H], any float dtype; targets: int64 [N]; head: [n, H] -> [n, V]. Returns float32 (logprobs [N], entropy [N]).
    The entropy has a graph only if `entropy_graph`. Logits live for a chunk of `chunk_tokens` at a time, in forward and, since
    each chunk is recomputed there, in backward too: at most chunk_tokens * V numbers.
    """

    def chunk(h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(h).float() / temperature
        logprobs = logits.log_softmax(dim=-1)
        with torch.set_grad_enabled(entropy_graph and torch.is_grad_enabled()):
            # Not entr(p): its gradient at p = 0 is infinite, this one's is 0.
            entropy = -(logprobs.exp() * logprobs.clamp(min=torch.finfo(logprobs.dtype).min)).sum(dim=-1)
        return logprobs.gather(-1, y[:, None]).squeeze(-1), entropy

    if len(targets) <= chunk_tokens:  # one chunk is the bound anyway
        return chunk(hidden, targets)
    pairs = zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True)
    if torch.is_grad_enabled():
        parts = [checkpoint(chunk, h, y, use_reentrant=False, preserve_rng_state=False) for h, y in pairs]
    else:
        parts = [chunk(h, y) for h, y in pairs]
    logprobs, entropy = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropy)
