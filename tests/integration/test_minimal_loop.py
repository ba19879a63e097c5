"""examples/minimal_loop.py makes the trainer's updates: same pool and model -> same bounds, losses and weights."""

from __future__ import annotations

import csv
import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support import REPOSITORY, SMALL, run_experiment
from transformers import AutoModelForCausalLM, AutoTokenizer

from bapo.rollouts.pool import Pool, load_pool
from bapo.sft.warm_start import WarmStart
from bapo.tasks.digit_ops import DigitOps
from bapo.training.resume import newest_checkpoint

WARM_START = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
TASK = DigitOps(digits=2, train_size=200, test_size=32)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("minimal_loop", REPOSITORY / "examples" / "minimal_loop.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    module.EPOCHS, module.MINIBATCHES, module.GROUP, module.WARMUP = 2, 4, 4, 2
    return module


@pytest.fixture(scope="module")
def start(cache_dir: Path) -> Path:
    """The model before the first update."""
    model = WARM_START | {"num_key_value_heads": 1}
    return WarmStart(steps=150, batch_size=32, model=model, cache_dir=str(cache_dir))(TASK)


@pytest.fixture(scope="module")
def run(start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the trainer: one round of eight updates."""
    folder = tmp_path_factory.mktemp("run")
    run_experiment(
        folder, *SMALL, "policy.warm_start=null", f"policy.path={start}", "trainer.max_rounds=1",
        "schedule.minibatches_per_epoch=4", "callbacks.evaluate=null", "loss.target_positive_ratio=0.55",
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def pool(run: Path) -> Pool:
    return load_pool(run / "rounds", 0)


def test_its_updates_are_the_trainers(example: ModuleType, start: Path, run: Path, pool: Pool) -> None:
    model, batch = AutoModelForCausalLM.from_pretrained(start), pool.batch
    own = example.Pool(batch.input_ids, batch.response_mask, batch.behaviour_logprobs, batch.advantages)
    optimizer, schedule = example.optimizer_of(model)
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    rows = example.train_round(model, optimizer, schedule, example.LOSS, own, round_index=0)
    with (run / "metrics.csv").open() as file:
        logged = [row for row in csv.DictReader(file) if row["policy/loss"]]
    assert len(rows) == len(logged) == 8
    for row, log in zip(rows, logged, strict=True):
        assert row["clip_low"] == float(log["bounds/clip_low"])
        assert row["clip_high"] == float(log["bounds/clip_high"])
        assert row["loss"] == pytest.approx(float(log["policy/loss"]), abs=1e-6)
        assert row["positive_ratio"] == pytest.approx(float(log["bounds/positive_ratio"]), abs=1e-6)
    assert len({(row["clip_low"], row["clip_high"]) for row in rows}) > 1  # the search moved them
    state = torch.load(newest_checkpoint(run), weights_only=True)["state_dict"]
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    trained = torch.cat([state[f"policy.model.{name}"].flatten() for name, _ in model.named_parameters()])
    assert (trained - before).abs().max() > 1e-3
    torch.testing.assert_close(weights, trained, atol=1e-6, rtol=0)


def test_its_pool_is_the_trainers(example: ModuleType, start: Path, pool: Pool) -> None:
    """Grades, advantages and behaviour log-probs of the responses that the trainer generated."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(start), AutoTokenizer.from_pretrained(start)
    batch, of_uid = pool.batch, {prompt.uid: prompt for prompt in TASK.prompts("train")}
    prompts = [of_uid[uid.split("@")[0]] for uid, _, _ in pool.rows]
    rewards, advantages = example.grade(TASK, tokenizer, prompts, batch.input_ids, batch.response_mask)
    assert torch.equal(rewards, batch.rewards)
    assert torch.equal(advantages, batch.advantages)
    with torch.no_grad():
        logprobs = example.token_logprobs(model, batch.input_ids, batch.response_mask)
    torch.testing.assert_close(logprobs, batch.behaviour_logprobs, atol=1e-5, rtol=0)


def test_it_generates_from_the_model(example: ModuleType, start: Path) -> None:
    """As often as the model says: sampled frequencies of first tokens against its probabilities."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(start), AutoTokenizer.from_pretrained(start)
    torch.manual_seed(0)
    prompt = torch.tensor(tokenizer(["b12="])["input_ids"])
    ids, mask = example.generate(model, prompt.repeat(4000, 1), tokenizer.eos_token_id, tokenizer.pad_token_id)
    with torch.no_grad():
        probabilities = model(prompt).logits[0, -1].softmax(-1)
    counts = torch.bincount(ids[:, prompt.shape[1]], minlength=len(probabilities)) / 4000
    assert (counts - probabilities).abs().max() < 0.03
    assert not mask[:, : prompt.shape[1]].any()
    for row, kept in zip(ids.tolist(), mask.tolist(), strict=True):
        response = [token for token, one in zip(row, kept, strict=True) if one]
        assert tokenizer.eos_token_id not in response[:-1]
        assert response[-1] == tokenizer.eos_token_id or len(response) == example.MAX_TOKENS


def test_a_round_from_prompts_to_updates(example: ModuleType, start: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(start), AutoTokenizer.from_pretrained(start)
    torch.manual_seed(0)
    pool, accuracy = example.collect(model, tokenizer, TASK, list(TASK.prompts("train"))[:32])
    assert 0 < accuracy < 1
    assert len(pool.advantages) % example.GROUP == 0
    assert (pool.advantages != 0).all()
    rows = example.train_round(model, *example.optimizer_of(model), example.LOSS, pool, 0)
    assert len(rows) == 8
    assert all(math.isfinite(value) for row in rows for value in row.values())
