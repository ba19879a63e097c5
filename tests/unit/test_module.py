"""One mini-batch is one update: however it is cut, its steps, rates, clipping, skips."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support import random_batch
from support.updates import BAPO, GRPO, Rounds, Rows, adamw, behaviour_of, fit
from transformers import get_scheduler

from bapo.losses import AdaptiveRatioLoss, CispoLoss, GspoLoss
from bapo.losses.objective import Objective
from bapo.metrics import lookup
from bapo.module import BapoModule
from bapo.policy.causal_lm import CausalLMPolicy, load_model
from bapo.types import Batch, LossInputs


def warmup(updates: int):
    return partial(get_scheduler, "constant_with_warmup", num_warmup_steps=updates)


def weights(module: BapoModule) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.policy.parameters()])


def gradient_of_one_update(folder: Path, batch: Batch, loss, budget: int) -> tuple[torch.Tensor, dict]:
    """The gradient as the optimizer meets it (SGD of lr 1 without clipping would move the weights by it)."""
    seen = []

    class Spy(BapoModule):
        def _step(self, *args):
            seen.append(torch.cat([p.grad.flatten() for p in self.policy.parameters()]))
            return super()._step(*args)

    module = Spy(CausalLMPolicy(load_model(folder)), loss, Objective(), adamw(1e-3), budget, 10, max_grad_norm=1e9)
    rows = Rows()
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", logger=rows, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, datamodule=Rounds([[batch]]))
    return seen[0], rows.rows[0][1]


@pytest.mark.parametrize("loss", [BAPO, GRPO], ids=["bapo", "grpo"])
def test_gradient_bounds_and_metrics_do_not_depend_on_micro_batches(model_folder, loss):
    batch = replace(random_batch(8, seed=6), policy_version=torch.where(random_batch(8, seed=6).response_mask, -7, -1))
    longest = int(batch.lengths().max())
    if loss.adaptive:  # a target that the search meets half way
        _, row = gradient_of_one_update(model_folder, batch, replace(BAPO, target_positive_ratio=0.999), budget=10_000)
        half_way = (row["bounds/positive_ratio_start"] + row["bounds/positive_ratio"]) / 2
        loss = replace(BAPO, target_positive_ratio=half_way)
    whole, row = gradient_of_one_update(model_folder, batch, loss, budget=8 * longest)
    if loss.adaptive:
        assert (row["bounds/target_met"], row["bounds/saturated"]) == (1, 0)
        assert row["bounds/clip_high"] > 1.2
    for budget, pieces in ((4 * longest, 2), (1, 8)):
        cut, cut_row = gradient_of_one_update(model_folder, batch, loss, budget)
        assert float((cut - whole).norm() / whole.norm()) < 1e-6, pieces
        assert cut_row["bounds/clip_low"] == row["bounds/clip_low"]
        assert cut_row["bounds/clip_high"] == row["bounds/clip_high"]
        for name, value in row.items():
            if not name.startswith(("time/", "perf/")):
                assert cut_row[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_the_update_equals_a_hand_written_one(model_folder):
    batch = random_batch(6, seed=1, version=-3)
    gradient, row = gradient_of_one_update(model_folder, batch, GRPO, budget=1)
    model = load_model(model_folder)
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask.long()).logits[:, :-1]
    logprobs = logits.log_softmax(-1).gather(-1, batch.input_ids[:, 1:, None]).squeeze(-1)
    mask = batch.response_mask[:, 1:]
    ratio = (logprobs - batch.behaviour_logprobs[:, 1:]).exp()
    advantage = batch.advantages[:, None]
    loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)[mask].sum() / mask.sum()
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-4)
    assert row["policy/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert row["policy/grad_norm"] == pytest.approx(expected.norm().item(), rel=1e-4)


def test_every_ratio_is_one_before_the_first_step_and_not_after(model_folder):
    batch = behaviour_of(model_folder, random_batch(8))
    kept = batch.behaviour_logprobs.clone()
    _, rows, _ = fit(model_folder, [[batch]] * 3, budget=40)
    assert rows["policy/ratio_max"][0] == pytest.approx(1.0, abs=1e-6)
    assert rows["policy/clip_frac"][0] == 0.0
    assert rows["bounds/search_effective"][0] == 0.0
    assert min(rows["policy/ratio_max"][1:]) > 1.001
    assert rows["staleness/mean"] == [0.0, 1.0, 2.0]
    assert torch.equal(batch.behaviour_logprobs, kept)


def test_learning_rate_zero_leaves_every_ratio_at_one(model_folder):
    batch = behaviour_of(model_folder, random_batch(8))
    _, rows, _ = fit(model_folder, [[batch]] * 2, lr=1e-30)
    assert rows["policy/ratio_mean"] == pytest.approx([1.0, 1.0], abs=1e-6)


class CountForwards(CausalLMPolicy):
    calls = 0

    def forward(self, batch, entropy_graph=False):
        self.calls += 1
        return super().forward(batch, entropy_graph)


@pytest.mark.parametrize(
    ("loss", "stale", "budget", "forwards"),
    [
        (BAPO, True, 1, 16),  # 8 to tally, 8 to train
        (BAPO, False, 1, 8),  # on-policy data: every ratio is 1, nothing to look up
        (BAPO, True, 10_000, 1),  # one micro-batch: its own forward serves both
        (GRPO, True, 1, 8),  # bounds that do not look at the data
    ],
)
def test_no_pass_is_spent_where_it_cannot_matter(model_folder, loss, stale, budget, forwards):
    batch = behaviour_of(model_folder, random_batch(8, version=-5 if stale else 0))
    policy = CountForwards(load_model(model_folder))
    fit(model_folder, [[batch]], loss, budget, policy=policy)
    assert policy.calls == forwards


def test_steps_checkpoints_and_learning_rate_move_with_updates(model_folder, tmp_path):
    batch = behaviour_of(model_folder, random_batch(4))
    saves = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    module, rows, trainer = fit(
        model_folder, [[batch, batch], [batch, batch, batch, batch]], lr=1.0, schedule=warmup(4),
        callbacks=[saves], enable_checkpointing=True,
    )  # fmt: skip
    assert trainer.global_step == module.version() == 6
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step=2.ckpt", "step=4.ckpt", "step=6.ckpt"]
    assert rows["policy/lr"] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert [step for step, _ in rows.rows] == [1, 2, 3, 4, 5, 6] == rows["trainer/global_step"]
    assert all(p.grad is None for p in module.policy.parameters())


def test_max_steps_stops_after_exactly_that_many_updates(model_folder):
    batch = behaviour_of(model_folder, random_batch(4))
    _, rows, trainer = fit(model_folder, [[batch] * 4] * 3, max_steps=5, budget=1)
    assert trainer.global_step == len(rows.rows) == 5


def test_lightnings_own_accumulation_and_clipping_are_refused_in_manual_mode(model_folder):
    batch = random_batch(2)
    for option in ({"gradient_clip_val": 1.0}, {"accumulate_grad_batches": 4}):
        with pytest.raises(L.pytorch.utilities.exceptions.MisconfigurationException):
            fit(model_folder, [[batch]], **option)


def test_the_gradient_is_clipped_once_per_update_and_logged_before(model_folder):
    module = BapoModule(CausalLMPolicy(load_model(model_folder)), GRPO, Objective(), adamw(1.0), 1, 1)
    first, second, *rest = module.policy.parameters()
    seen = {}

    class Stub:
        param_groups = ({"lr": 1.0},)

        def step(self):
            seen["grads"] = (float(first.grad.flatten()[0]), float(second.grad.flatten()[0]))

        def zero_grad(self):
            pass

    module._optimizer = Stub
    module.lr_schedulers = Stub
    for p in rest:
        p.grad = torch.zeros_like(p)
    for p, value in ((first, 3.0), (second, 4.0)):
        p.grad = torch.zeros_like(p)
        p.grad.view(-1)[0] = value
    row = {}
    assert module._step(row, loss=0.0, tokens=1)
    assert row == {"policy/grad_norm": 5.0, "policy/lr": 1.0, "policy/skipped_updates": 0}
    assert seen["grads"] == pytest.approx((0.6, 0.8), abs=1e-5)


def poisoned(batch: Batch, value: float) -> Batch:
    behaviour = batch.behaviour_logprobs.clone()
    row, slot = batch.response_mask.nonzero()[0]
    behaviour[row, slot] = value
    return replace(batch, behaviour_logprobs=behaviour)


def test_an_update_that_is_not_finite_is_skipped_and_moves_nothing(model_folder, caplog):
    good = behaviour_of(model_folder, random_batch(4))
    bad = poisoned(good, float("nan"))
    with_skip, rows, trainer = fit(model_folder, [[good, bad, good, bad, good]], budget=1, schedule=warmup(9))
    without, plain, _ = fit(model_folder, [[good, good, good]], budget=1, schedule=warmup(9))
    assert trainer.global_step == 3
    assert torch.equal(weights(with_skip), weights(without))
    assert rows["policy/lr"] == plain["policy/lr"]
    assert rows["policy/skipped_updates"] == [0, 1, 2]
    assert "update skipped" in caplog.text


@pytest.mark.parametrize("value", [float("inf"), float("-inf")])
@pytest.mark.parametrize("loss", [BAPO, GRPO, CispoLoss(0.0, 5.0), GspoLoss(0.9997, 1.0004), AdaptiveRatioLoss()], ids=repr)
def test_an_infinite_log_prob_is_skipped_by_every_loss(model_folder, loss, value):
    good = behaviour_of(model_folder, random_batch(4))
    _, rows, trainer = fit(model_folder, [[good, poisoned(good, value), good]], loss=copy.deepcopy(loss), budget=1)
    assert trainer.global_step == 2
    assert rows["policy/skipped_updates"] == [0, 1]


def test_a_skipped_update_leaves_no_trace_in_the_loss_either(model_folder):
    good = behaviour_of(model_folder, random_batch(4))
    loss, plain = AdaptiveRatioLoss(), AdaptiveRatioLoss()
    fit(model_folder, [[good, poisoned(good, float("nan")), good]], loss=loss)
    fit(model_folder, [[good, good]], loss=plain)
    assert loss.state_dict() == plain.state_dict() != AdaptiveRatioLoss().state_dict()


def test_three_skips_in_a_row_end_the_run_with_the_weights_as_they_were(model_folder):
    bad = poisoned(random_batch(4), float("nan"))
    policy = CausalLMPolicy(load_model(model_folder))
    before = copy.deepcopy(policy)
    with pytest.raises(RuntimeError, match="3 updates in a row"):
        fit(model_folder, [[bad] * 4], policy=policy)
    for p, q in zip(policy.parameters(), before.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_nan_in_a_masked_slot_changes_nothing(model_folder):
    batch = behaviour_of(model_folder, random_batch(4))
    dirty = replace(
        batch,
        behaviour_logprobs=batch.behaviour_logprobs.masked_fill(~batch.response_mask, float("nan")),
        sampler_logprobs=batch.sampler_logprobs.masked_fill(~batch.response_mask, float("nan")),
    )
    clean, rows, _ = fit(model_folder, [[batch]] * 2, budget=20)
    same, dirty_rows, _ = fit(model_folder, [[dirty]] * 2, budget=20)
    assert torch.equal(weights(clean), weights(same))
    for (_, row), (_, dirty_row) in zip(rows.rows, dirty_rows.rows, strict=True):
        for name, value in row.items():
            if not name.startswith(("time/", "perf/")):
                assert dirty_row[name] == value, name


def test_a_response_with_no_trained_token_is_not_counted(model_folder):
    """Rows of zero tokens would dilute the loss if the denominator counted them."""
    batch = behaviour_of(model_folder, random_batch(4))
    gradient, row = gradient_of_one_update(model_folder, batch.select(torch.tensor([0, 1])), GRPO, 1)
    masked = replace(batch, response_mask=batch.response_mask & torch.tensor([True, True, False, False])[:, None])
    half, half_row = gradient_of_one_update(model_folder, masked, GRPO, 1)
    torch.testing.assert_close(half, gradient, atol=1e-7, rtol=1e-5)
    assert half_row["policy/loss"] == pytest.approx(row["policy/loss"], rel=1e-5, abs=1e-8)


def test_an_update_without_any_token_is_skipped(model_folder):
    batch = behaviour_of(model_folder, random_batch(4))
    empty = replace(batch, response_mask=torch.zeros_like(batch.response_mask))
    module, rows, trainer = fit(model_folder, [[empty, batch]])
    alone, _, _ = fit(model_folder, [[batch]])
    assert trainer.global_step == 1
    assert rows["policy/skipped_updates"] == [1]
    assert torch.equal(weights(module), weights(alone))


@pytest.mark.parametrize("loss", [BAPO, GRPO], ids=["bapo", "grpo"])
def test_every_update_logs_one_row_of_registered_finite_metrics(model_folder, loss):
    batch = behaviour_of(model_folder, random_batch(6))
    _, rows, _ = fit(model_folder, [[batch, batch]] * 2, loss, budget=20)
    assert len(rows.rows) == 4
    for _, row in rows.rows:
        assert all(lookup(name) for name in row)
        assert all(torch.isfinite(torch.tensor(v)) for v in row.values())
        for name in ("bounds/clip_low", "bounds/clip_high", "bounds/positive_ratio", "policy/entropy", "staleness/mean"):
            assert name in row


def lr_of_updates(module: BapoModule, updates: int) -> list[float]:
    parts = module.configure_optimizers()
    values = []
    for _ in range(updates):
        values.append(round(parts["optimizer"].param_groups[0]["lr"], 6))
        parts["optimizer"].step()
        parts["lr_scheduler"].step()
    return values


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (None, [1.0] * 6),
        (partial(get_scheduler, "constant"), [1.0] * 6),
        (partial(get_scheduler, "constant_with_warmup", num_warmup_steps=4), [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
        (partial(get_scheduler, "linear", num_warmup_steps=2), [0.5, 1.0, 0.8, 0.6, 0.4, 0.2]),
        (partial(get_scheduler, "cosine", num_warmup_steps=0), [0.95048, 0.811745, 0.61126, 0.38874, 0.188255, 0.049516]),
        (partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.1), [1.0, 1.0, 0.1, 0.1, 0.01, 0.01]),
    ],
    ids=["none", "constant", "warmup", "linear", "cosine", "torch's StepLR"],
)
def test_learning_rate_schedules(model_folder, schedule, expected, recwarn):
    policy = CausalLMPolicy(load_model(model_folder))
    module = BapoModule(policy, GRPO, Objective(), adamw(1.0), 1, total_updates=6, lr_schedule=schedule)
    assert lr_of_updates(module, 6) == pytest.approx(expected, abs=1e-5)
    assert not [warning for warning in recwarn if "lr_scheduler" in str(warning.message)]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad])
def test_any_torch_optimizer_steps(model_folder, optimizer):
    batch = behaviour_of(model_folder, random_batch(4))
    policy = CausalLMPolicy(load_model(model_folder))
    before = copy.deepcopy(policy)
    module = BapoModule(policy, GRPO, Objective(), partial(optimizer, lr=0.1), 999, 1)
    L.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, barebones=True,
    ).fit(module, datamodule=Rounds([[batch]]))  # fmt: skip
    assert module.latest["policy/lr"] == 0.1
    assert any(not torch.equal(p, q) for p, q in zip(policy.parameters(), before.parameters(), strict=True))


def objective_update(
    folder: Path, batch: Batch, objective: Objective, budget: int, loss=GRPO, reference=None
) -> tuple[torch.Tensor, dict]:
    """Weights after one update, and its row."""
    policy = CausalLMPolicy(load_model(folder))
    module = BapoModule(policy, loss, objective, adamw(1e-2), budget, 10)
    rows = Rows()
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", logger=rows, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(module, datamodule=Rounds([[batch]]))
    return weights(module), rows.rows[0][1]


@pytest.mark.parametrize(
    "objective",
    [
        Objective(aggregation="sequence_mean"),
        Objective(aggregation="sequence_sum", sequence_constant=9),
        Objective(correction="token_tis"),
        Objective(correction="sequence_mis"),
        Objective(top_entropy_frac=0.2),
        Objective(entropy_bonus=0.1),
        Objective(reference_kl=0.5),
    ],
    ids=lambda o: next(f"{k}={v}" for k, v in vars(o).items() if v != getattr(Objective(), k)),
)
def test_every_objective_trains_the_same_however_it_is_cut_and_not_as_the_default(model_folder, objective):
    torch.manual_seed(0)
    batch = replace(random_batch(8, seed=6, version=-3), sampler_logprobs=random_batch(8, seed=7).behaviour_logprobs)
    batch = replace(
        batch,
        sampler_logprobs=torch.where(
            batch.response_mask, batch.behaviour_logprobs + 0.9 * torch.randn(batch.input_ids.shape), 0
        ),
    )
    reference = CausalLMPolicy(load_model(model_folder))
    with torch.no_grad():
        for p in reference.parameters():
            p.add_(0.1 * torch.randn(p.shape))
    batch = replace(batch, reference_logprobs=reference.token_stats(batch, 10_000).logprobs)
    whole, row = objective_update(model_folder, batch, objective, 10_000)
    for budget in (4 * int(batch.lengths().max()), 1):
        cut, cut_row = objective_update(model_folder, batch, objective, budget)
        torch.testing.assert_close(cut, whole, atol=3e-5, rtol=1e-4)
        for name, value in row.items():
            if not name.startswith(("time/", "perf/")):
                assert cut_row[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    default, _ = objective_update(model_folder, batch, Objective(), 10_000)
    assert float((whole - default).norm()) > 1e-3


def test_the_entropy_filter_keeps_its_share_of_the_whole_update(model_folder):
    batch = random_batch(32, seed=3, version=-3)
    _, row = objective_update(model_folder, batch, Objective(top_entropy_frac=0.2), 1)
    assert row["policy/kept_token_frac"] == pytest.approx(0.2, abs=0.02)


def several_updates(folder: Path, batch: Batch, objective: Objective) -> Rows:
    reference = CausalLMPolicy(load_model(folder))
    batch = replace(batch, reference_logprobs=reference.token_stats(batch, 10_000).logprobs)
    module = BapoModule(CausalLMPolicy(load_model(folder)), GRPO, objective, adamw(2e-3), 999, 10, reference)
    rows = Rows()
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", logger=rows, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(module, datamodule=Rounds([[batch] * 6]))
    return rows


def test_the_entropy_bonus_raises_entropy(model_folder):
    still = replace(behaviour_of(model_folder, random_batch(8)), advantages=torch.zeros(8))
    entropy = several_updates(model_folder, still, Objective(entropy_bonus=1.0))["policy/entropy"]
    assert entropy == sorted(entropy)
    assert entropy[-1] > entropy[0] + 0.001


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_reference_penalty_holds_the_policy_back(model_folder, estimator):
    batch = behaviour_of(model_folder, random_batch(8))
    free = several_updates(model_folder, batch, Objective(reference_kl=1e-9, kl_estimator=estimator))["policy/reference_kl"]
    held = several_updates(model_folder, batch, Objective(reference_kl=10.0, kl_estimator=estimator))["policy/reference_kl"]
    assert free[0] == held[0] == 0.0
    assert 0 < held[-1] < free[-1] / 2


def test_bounds_of_each_micro_batch_are_its_own_and_logged_as_their_mean(model_folder):
    batch = random_batch(8, seed=6, version=-3)
    searching = replace(BAPO, target_positive_ratio=0.7)
    own = replace(searching, bounds_scope="micro_batch")
    _, one = objective_update(model_folder, batch, Objective(), 10_000, own)
    _, update = objective_update(model_folder, batch, Objective(), 10_000, searching)
    assert one["bounds/clip_high"] == pytest.approx(update["bounds/clip_high"])
    _, cut = objective_update(model_folder, batch, Objective(), 1, own)
    high = []
    for row in range(8):
        alone = batch.select(torch.tensor([row]))
        logprobs = CausalLMPolicy(load_model(model_folder)).token_stats(alone, 999).logprobs
        inputs = LossInputs(
            logprobs, alone.behaviour_logprobs, alone.advantages[:, None].expand_as(logprobs), alone.response_mask
        )
        tokens = int(alone.response_mask.sum())
        high += [float(own.choose(own.tally(inputs)).clip_high)] * tokens
    assert cut["bounds/clip_high"] == pytest.approx(sum(high) / len(high), rel=1e-5)
    assert len(set(high)) > 1
