"""The whole algorithm on one page of plain torch: BAPO on a tiny model, on two CPU cores, with nothing to download.

    python examples/minimal_loop.py

A round: generate G responses to each of N prompts, grade them, compare each with its group, then make E x M optimizer updates
on this pool. After the first update the policy is no longer the one that generated: r, the importance ratio, leaves 1. Before
every update BAPO moves the clip bounds until the tokens with A > 0 carry a target share of the gradient. (arXiv 2510.18927)

Shapes: B responses, T tokens, V vocabulary. Rows are [prompt | response | padding].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from bapo.advantages import group_advantages
from bapo.losses import BapoLoss, BoundRange
from bapo.rollouts.schedule import deal_minibatches
from bapo.sft.warm_start import WarmStart
from bapo.tasks.digit_ops import DigitOps
from bapo.types import LossInputs

SEED, ROUNDS = 0, 20
PROMPTS, GROUP, MAX_TOKENS = 64, 8, 20
EPOCHS, MINIBATCHES = 4, 4
LR, WARMUP, MAX_GRAD_NORM = 3e-4, 20, 1.0
LOSS = BapoLoss(0.55, clip_low=BoundRange(0.6, 0.9, 0.02), clip_high=BoundRange(1.2, 3.0, 0.05))


@dataclass
class Pool:
    """Responses to train on: input_ids int64, response_mask bool, behaviour_logprobs float32, all [B, T]; advantages [B]."""

    input_ids: Tensor
    response_mask: Tensor
    behaviour_logprobs: Tensor
    advantages: Tensor

    def select(self, rows: Tensor) -> Pool:
        return Pool(*(tensor[rows] for tensor in vars(self).values()))


def token_logprobs(model, input_ids: Tensor, response_mask: Tensor) -> Tensor:
    """log pi(y_t | x, y_<t) of every response token, 0 elsewhere; [B, T]. Slot t is predicted from slot t - 1."""
    logprobs = model(input_ids=input_ids).logits[:, :-1].log_softmax(dim=-1)
    taken = logprobs.gather(-1, input_ids[:, 1:, None]).squeeze(-1)
    return torch.where(response_mask, torch.nn.functional.pad(taken, (1, 0)), 0)


@torch.no_grad()
def generate(model, prompt_ids: Tensor, eos: int, pad: int) -> tuple[Tensor, Tensor]:
    """A sampled response to each prompt [B, P], which are of equal length. Returns input_ids and response_mask [B, T]."""
    ids, cache, running = prompt_ids, None, torch.ones(len(prompt_ids), dtype=torch.bool)
    mask = torch.zeros_like(prompt_ids, dtype=torch.bool)
    for _ in range(MAX_TOKENS):
        output = model(input_ids=ids if cache is None else ids[:, -1:], past_key_values=cache, use_cache=True)
        cache, probabilities = output.past_key_values, output.logits[:, -1].softmax(dim=-1)
        token = torch.where(running, torch.multinomial(probabilities, 1).squeeze(-1), pad)
        ids, mask = torch.cat([ids, token[:, None]], dim=1), torch.cat([mask, running[:, None]], dim=1)
        running = running & (token != eos)  # the end of the sequence is trained on, what follows is not
    return ids, mask


def grade(task, tokenizer, prompts: list, input_ids: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Rewards [B] of the responses, and their advantages within their group: (R - mean) / std."""
    texts = [tokenizer.decode(ids[mask], skip_special_tokens=True) for ids, mask in zip(input_ids, response_mask, strict=True)]
    rewards = torch.tensor(task.verify(prompts, texts))
    return rewards, group_advantages(rewards, [prompt.uid for prompt in prompts])


def collect(model, tokenizer, task, prompts: list) -> tuple[Pool, float]:
    """The pool of a round, and the share of right answers. Groups that are all right or all wrong teach nothing."""
    prompts = [prompt for prompt in prompts for _ in range(GROUP)]
    prompt_ids = torch.tensor(tokenizer([prompt.text for prompt in prompts])["input_ids"])
    input_ids, mask = generate(model, prompt_ids, tokenizer.eos_token_id, tokenizer.pad_token_id)
    rewards, advantages = grade(task, tokenizer, prompts, input_ids, mask)
    with torch.no_grad():
        behaviour = token_logprobs(model, input_ids, mask)
    return Pool(input_ids, mask, behaviour, advantages).select(advantages != 0), rewards.mean().item()


def update(model, optimizer, loss, pool: Pool) -> dict[str, float]:
    """One optimizer update on one mini-batch: choose the bounds, then step along the clipped surrogate's gradient."""
    mask = pool.response_mask
    logprobs = token_logprobs(model, pool.input_ids, mask)
    inputs = LossInputs(logprobs, pool.behaviour_logprobs, pool.advantages[:, None].expand_as(logprobs), mask)
    bounds = loss.choose(loss.tally(inputs))  # Algorithm 1: a table of masses, and the first candidate that reaches the target
    output = loss(inputs, bounds, denominator=mask.sum())
    optimizer.zero_grad()
    output.loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    row = {"loss": output.loss, "positive_ratio": bounds.positive_ratio}
    row |= {"clip_low": bounds.clip_low, "clip_high": bounds.clip_high}
    return {name: value.item() for name, value in row.items()}


def train_round(model, optimizer, schedule, loss, pool: Pool, round_index: int) -> list[dict[str, float]]:
    """E passes over the pool, each in M mini-batches; the last updates are E x M - 1 updates off-policy."""
    rows = []
    for epoch in range(round_index * EPOCHS, (round_index + 1) * EPOCHS):
        for part in deal_minibatches(len(pool.advantages), MINIBATCHES, SEED, epoch):
            rows.append(update(model, optimizer, loss, pool.select(part)))
            schedule.step()
    return rows


def optimizer_of(model):
    """AdamW and its warm-up: update k uses k / WARMUP of the learning rate."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1, (done + 1) / WARMUP))


def main() -> None:
    torch.manual_seed(SEED)
    torch.set_num_threads(1)  # more would wait for each other on tensors this small
    task = DigitOps()
    folder = WarmStart()(task)  # fitted to the task's noisy demonstrations, once, then cached
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    optimizer, schedule = optimizer_of(model)
    prompts = list(task.prompts("train"))
    for index in range(ROUNDS):
        chosen = [prompts[i] for i in torch.randperm(len(prompts))[:PROMPTS]]
        pool, accuracy = collect(model, tokenizer, task, chosen)
        row = train_round(model, optimizer, schedule, LOSS, pool, index)[-1]
        bounds = f"clip [{row['clip_low']:.2f}, {row['clip_high']:.2f}]"
        print(f"round {index}: {accuracy:.3f} right; last update: {bounds}, positive ratio {row['positive_ratio']:.3f}")


if __name__ == "__main__":
    main()
