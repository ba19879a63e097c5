"""Each preset against the table of its sources, as a file of conf/loss and as a Python value."""

import re
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from bapo.losses import PRESETS, BapoLoss, FixedClipLoss

LOSSES = Path(__file__).parents[2] / "conf" / "loss"

# name: share, clip_low a-:b-:step, clip_high a+:b+:step, order, mass, weight, dual clip, whether the search knows it.
# Sources: arXiv 2510.18927, section 5.1, Algorithm 1, Eq. 8 and Appendix A; the port for Trinity-RFT; the authors' code at
# commit 72870444: bapo_trainer.yaml (P/N = 1), run_bapo_example.sh (P/N = 0.5), README.
TABLE = {
    "bapo": (0.4, (0.6, 0.9, 0.02), (1.2, 3.0, 0.05), "high_first", "gradient", "none", None),
    "bapo_eq8": (0.4, (0.6, 0.9, 0.02), (1.2, 3.0, 0.05), "high_first", "surrogate", "behaviour_prob", None),
    "bapo_octothinker": (0.45, (0.8, 0.9, 0.02), (1.2, 2.0, 0.05), "high_first", "gradient", "none", None),
    "bapo_trinity": (0.4, (0.6, 0.9, 0.02), (1.2, 3.0, 0.05), "high_first", "gradient", "none", (3.0, True)),
    "bapo_reference": (0.5, (0.6, 0.8, 0.05), (1.2, 2.0, 0.05), "low_first", "surrogate", "none", (3.0, False)),
    "bapo_reference_script": (1 / 3, (0.8, 0.95, 0.05), (1.2, 2.0, 0.1), "low_first", "surrogate", "none", (3.0, False)),
    "bapo_reference_readme": (0.5, (0.6, 0.9, 0.05), (1.2, 3.0, 0.05), "low_first", "surrogate", "none", (3.0, False)),
}
FIXED = {
    "grpo": FixedClipLoss(0.8, 1.2),
    "clip_higher": FixedClipLoss(0.8, 1.28),
    "asymmetric_high": FixedClipLoss(0.8, 2.0),
    "asymmetric_low": FixedClipLoss(0.9, 1.2),
    "fixed": FixedClipLoss(0.75, 2.1),
}


def from_file(name: str, *overrides: str) -> Any:
    with initialize_config_dir(str(LOSSES.parent), version_base="1.3"):
        return instantiate(compose(f"loss/{name}", overrides=list(overrides)).loss, _convert_="all")


def row(loss: BapoLoss) -> tuple:
    ranges = ((bounds.start, bounds.stop, bounds.step) for bounds in (loss.clip_low, loss.clip_high))
    dual = None if loss.dual_clip is None else (loss.dual_clip, loss.dual_clip_in_search)
    return loss.target_positive_ratio, *ranges, loss.search_order, loss.mass, loss.weight, dual


@pytest.mark.parametrize("name", TABLE)
def test_a_preset_is_what_its_sources_say(name: str) -> None:
    loss = PRESETS[name]
    assert row(loss) == TABLE[name]
    rest = (loss.balance, loss.target_mode, loss.target_margin, loss.bounds_scope, loss.counterfactuals)
    assert rest == ("share", "absolute", 0.0, "update", True)
    assert loss.counterfactual_targets == (0.3, 0.4, 0.5)


@pytest.mark.parametrize("name", TABLE)
def test_file_and_python_value_are_equal(name: str) -> None:
    assert from_file(name) == PRESETS[name]


def test_every_preset_is_in_the_table_of_its_sources() -> None:
    assert TABLE.keys() == PRESETS.keys()


@pytest.mark.parametrize("name", FIXED)
def test_fixed_bounds_are_those_of_their_sources(name: str) -> None:
    assert from_file(name) == FIXED[name]


@pytest.mark.parametrize("name", [*TABLE, *FIXED])
def test_every_number_says_its_source(name: str) -> None:
    """In a comment on its line, or on the line that opens its section."""
    source = ""
    for line in (LOSSES / f"{name}.yaml").read_text().splitlines():
        code, _, comment = line.partition("#")
        source = comment or source if line.startswith(" ") else comment
        assert source or not re.search(r":.*\d", code), line


def test_every_option_can_be_set_from_the_command_line() -> None:
    """The keys are all in the files, so that `loss.dual_clip=3` needs no plus sign."""
    loss = from_file("bapo_eq8", "loss.dual_clip=3", "loss.bounds_scope=micro_batch", "loss.counterfactual_targets=[0.2]")
    assert (loss.dual_clip, loss.bounds_scope, loss.counterfactual_targets) == (3, "micro_batch", (0.2,))
    assert from_file("fixed", "loss.clip_low=0.86", "loss.clip_high=2.9") == FixedClipLoss(0.86, 2.9)
