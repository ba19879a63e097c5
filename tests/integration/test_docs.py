"""Pages of docs/: generated parts are up to date, numbers recomputed, files, keys and metrics exist, commands parse."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
import shlex
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from omegaconf import OmegaConf
from support import REPOSITORY
from support.commands import commands, two_jobs
from support.configs import composed, parts_of, without_hydra

from bapo.advantages import group_advantages
from bapo.analysis.whatif.config import build, changed_config
from bapo.losses import PRESETS, search_clip_bounds
from bapo.losses.clip_bounds import Balance
from bapo.losses.objective import Aggregation, Correction, KlEstimator, aggregation_scale
from bapo.losses.surrogate import Mass, MassWeight
from bapo.metrics import METRICS, lookup
from bapo.training.callbacks.staleness import HISTOGRAM
from bapo.training.config_check import all_keys

DOCS = REPOSITORY / "docs"
PAGES = {name: (DOCS / f"{name}.md").read_text() for name in ("algorithm", "metrics", "staleness", "whatif")}
ALGORITHM = PAGES["algorithm"]

spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
assert spec
assert spec.loader
generate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generate)


def spans(text: str) -> list[str]:
    """Text in backticks, outside of blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


SPANS = [span for page in PAGES.values() for span in spans(page)]


# Generated parts.


def test_generated_parts_are_up_to_date() -> None:
    assert generate.main(["--check"]) == 0, "run: make docs"
    names = [name for page in DOCS.glob("*.md") for _, name, _ in generate.BLOCK.findall(page.read_text())]
    assert sorted(names) == sorted(generate.PARTS)


def test_a_page_out_of_date_is_named_and_rewritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGES["metrics"].replace("completed optimizer updates", "epochs"))
    assert generate.main(["--check"], tmp_path) == 1
    assert f"{page} is out of date; run: make docs" in capsys.readouterr().err
    assert generate.main([], tmp_path) == 0
    assert page.read_text() == PAGES["metrics"]
    assert generate.main(["--check"], tmp_path) == 0
    assert generate.main(["--chekc"], tmp_path) == 2


def test_the_preset_table_holds_the_numbers_of_the_presets() -> None:
    rows = [line.split(" | ") for line in generate.presets().splitlines()[2:]]
    assert {row[0].strip("| `") for row in rows} >= PRESETS.keys()
    for row in (row for row in rows if row[0].strip("| `") in PRESETS):
        loss = PRESETS[row[0].strip("| `")]
        assert float(row[1]) == pytest.approx(loss.target_positive_ratio, abs=1e-4)
        for cell, bounds in ((row[2], loss.clip_low), (row[3], loss.clip_high)):
            assert [float(number) for number in cell.split(":")] == [bounds.start, bounds.stop, bounds.step]
        assert (row[4], row[5]) == (loss.search_order, f"{loss.mass} / {loss.weight}")
        assert row[6].startswith("off" if loss.dual_clip is None else str(loss.dual_clip))
        assert ("loss only" in row[6]) == (not loss.dual_clip_in_search)


def test_the_registry_table_has_every_metric_and_its_bars_escaped() -> None:
    lines = generate.registry().splitlines()[2:]
    assert METRICS.keys() <= {line.split("`")[1] for line in lines}
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {5}


# Numbers written by hand.


def ratio_at(ratios: list[float], mass: str, clip_low: float, clip_high: float) -> float:
    """Positive ratio at two pinned bounds; the first token has advantage 1, the others -1."""
    r = torch.tensor([ratios], dtype=torch.float64)
    advantages = torch.full_like(r, -1)
    advantages[0, 0] = 1
    bounds = search_clip_bounds(
        logprobs=r.log(),
        behaviour_logprobs=torch.zeros_like(r),
        advantages=advantages,
        response_mask=torch.ones_like(r),
        mass=mass,  # type: ignore[arg-type]
        clip_low=(clip_low, clip_low),
        clip_high=(clip_high, clip_high),
    )
    assert bounds.positive_ratio is not None
    return bounds.positive_ratio.item()


def test_the_direction_of_clip_low_is_as_shown() -> None:
    header, clip_high = re.search(r"^\| r \| mass \| clip_low (.*) \|$", ALGORITHM, re.M), 1.2
    assert header
    assert f"With clip_high = {clip_high}" in ALGORITHM
    lows = [float(low) for low in header[1].split(" | ")]
    rows = re.findall(r"^\| ([\d., ]+) \| `(surrogate|gradient)` \| ([\d. |]+) \|$", ALGORITHM, re.M)
    assert len(rows) == 4
    for ratios, mass, shown in rows:
        found = [ratio_at([float(r) for r in ratios.split(",")], mass, low, clip_high) for low in lows]
        assert [float(number) for number in shown.split(" | ")] == pytest.approx(found, abs=5e-5)
        assert found == sorted(found, reverse=mass == "surrogate")


def test_targets_of_other_readings_are_as_said() -> None:
    """P / |P - N| = t with P < N is P / N = t / (1 + t); P / (P + N) = t is P / N = t / (1 - t)."""
    assert "asks for P/N >= 0.286; a share of 0.4 for 0.667; the authors' YAML for 1.0 and their script for 0.5" in ALGORITHM
    share = {name: PRESETS[name].target_positive_ratio for name in ("bapo", "bapo_reference", "bapo_reference_script")}
    odds = [0.4 / 1.4, *(t / (1 - t) for t in share.values())]
    assert [round(x, 3) for x in odds] == [0.286, 0.667, 1.0, 0.5]


def test_counts_of_candidates_are_as_said() -> None:
    loss = PRESETS["bapo"]
    highs, lows = len(loss.clip_high), len(loss.clip_low)
    assert f"1 + {highs - 1} + {lows - 1} = {highs + lows - 1} with the paper's numbers" in ALGORITHM
    assert f"P at {highs} values, N at {lows}" in ALGORITHM
    assert f"{highs} + {lows} + 2 sums" in ALGORITHM


def test_the_share_at_one_is_the_length_share_of_right_answers() -> None:
    assert re.search(r"right answers of 4 tokens against wrong ones of 6 give\s+0\.4, equal lengths 0\.5", ALGORITHM)
    rewards = torch.tensor([1.0, 0, 0, 0])
    advantages = group_advantages(rewards, ["a"] * 4)

    def share(right: int, wrong: int, aggregation: str = "token_mean") -> float:
        lengths = torch.where(rewards > 0, right, wrong)
        mask = torch.arange(8) < lengths[:, None]
        bounds = search_clip_bounds(
            logprobs=torch.zeros(4, 8),
            behaviour_logprobs=torch.zeros(4, 8),
            advantages=advantages,
            response_mask=mask,
            weights=aggregation_scale(mask, aggregation),  # type: ignore[arg-type]
        )
        return bounds.metrics["bounds/positive_ratio_at_one"].item()

    assert share(4, 6) == pytest.approx(0.4, abs=1e-6)
    assert share(5, 5) == pytest.approx(0.5, abs=1e-6)
    assert share(4, 6, "sequence_mean") == pytest.approx(0.5, abs=1e-6)


def test_the_code_prints_what_its_comments_say() -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", ALGORITHM, re.M | re.S)
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(block, names)
    said = re.findall(r"^print.*\)  # (.*)$", block, re.M)
    assert len(said) == 2
    assert printed.getvalue().splitlines() == said
    assert names["new"].grad.abs().sum() > 0


# Names.


def test_every_file_is_there() -> None:
    paths = [span for span in SPANS if re.fullmatch(r"(conf|src|tests|docs)(/[\w.*-]*)+", span)]
    assert len(paths) > 5
    assert [path for path in paths if not list(REPOSITORY.glob(path))] == []
    links = [link for page in PAGES.values() for link in re.findall(r"\]\(([^)\s]+)\)", page)]
    assert [link for link in links if not re.match(r"https?:", link) and not (DOCS / link).exists()] == []


def test_every_loss_advantage_and_task_of_conf_is_in_a_generated_table() -> None:
    tables = {name: getattr(generate, name)() for name in ("presets", "others", "advantages", "tasks")}
    rows = {name: set(re.findall(r"^\| `(\w+)`", table, re.M)) for name, table in tables.items()}
    for group, listed in (
        ("loss", rows["presets"] | rows["others"]),
        ("advantage", rows["advantages"]),
        ("task", rows["tasks"]),
    ):
        assert listed == {path.stem for path in (REPOSITORY / "conf" / group).glob("[!_]*.yaml")}
    assert "aime_2024` | `2fe88a2` |" in tables["tasks"]
    assert "GRPO, arXiv 2402.03300" in tables["advantages"]


def test_the_equivalence_table_has_every_pair_and_marks_where_math_verify_differs() -> None:
    pairs = json.loads(generate.EQUIVALENCE.read_text())
    lines = generate.equivalence().splitlines()[2:]
    assert len(lines) == len(pairs) > 50
    marked = [line.split(" | ")[4].strip() != "" for line in lines]
    assert marked == [pair["same"] != pair["math_verify"] for pair in pairs]


def test_every_option_exists() -> None:
    known = all_keys(OmegaConf.to_container(without_hydra(composed())))
    known |= all_keys(OmegaConf.to_container(without_hydra(composed("+rollout/partial=default", "+schedule/replay=default"))))
    keys = [span.split("=")[0] for span in SPANS if re.match(r"(loss|objective|schedule|rollout|callbacks)\.\w", span)]
    assert len(keys) > 30
    assert set(keys) - known == set()


@pytest.mark.parametrize("span", sorted({s for s in SPANS if re.match(r"(loss|objective)[\w.]*=\w", s) and "NAME" not in s}))
def test_every_choice_builds(span: str) -> None:
    parts_of(span)


OPTIONS = {
    "loss.mass": Mass,
    "loss.weight": MassWeight,
    "loss.balance": Balance,
    "objective.aggregation": Aggregation,
    "objective.correction": Correction,
    "objective.kl_estimator": KlEstimator,
}


@pytest.mark.parametrize("field", OPTIONS)
def test_the_table_of_an_option_has_all_its_choices(field: str) -> None:
    """Rows from the one that names the option to the next option or the end of the table."""
    (rows,) = re.findall(rf"^\| `{field}` (.*\n(?:\|(?! `\w+\.).*\n)*)", ALGORITHM, re.M)
    cells = re.findall(r"^[| ]*(`\w+`(?:, `\w+`)*)(?: \(default\))? \|", rows, re.M)
    assert {name.strip("`") for cell in cells for name in cell.split(", ")} == set(get_args(OPTIONS[field]))


def test_every_metric_is_registered() -> None:
    spaces = "|".join(sorted({name.split("/")[0] for name in METRICS}))
    pages = "\n".join(PAGES[page] for page in ("algorithm", "staleness", "whatif"))
    names = [span for span in spans(pages) if re.fullmatch(rf"({spaces})/[\w@/]+", span) and span != HISTOGRAM]
    assert len(names) > 10
    for name in names:
        assert lookup(name)


COMMANDS = [command.replace("=NAME", "=bapo_eq8") for page in PAGES.values() for command in commands(page)]


@pytest.mark.parametrize("command", sorted(set(COMMANDS)))
def test_every_command_parses(command: str) -> None:
    if command == "make docs":
        assert re.search(r"^docs:.*\n.*docs/generate\.py$", (REPOSITORY / "Makefile").read_text(), re.M)
        return
    python, script, *arguments = shlex.split(command)
    assert python == "python"
    if script == "-m":
        if arguments[0] != "bapo.analysis.sweep":  # on runs in tests/test_readme.py
            assert arguments[0] == "bapo.analysis.whatif"  # with these overrides in tests/integration/test_whatif.py
            build(changed_config(without_hydra(composed()), [a for a in arguments[2:] if "=" in a]))
        return
    assert (REPOSITORY / script).is_file()
    if script == "train.py":
        parts_of(*two_jobs([a for a in arguments if a != "-m"])[1])
    elif script.startswith("benchmarks/"):
        assert Path(script).stem in (REPOSITORY / "tests" / "integration" / "test_benchmarks.py").read_text()
    else:
        assert (script, set(arguments) - {"--check"}) == ("docs/generate.py", set())
