import base64
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from bapo.analysis.figures import Panel, Picture, Run, has, missing, moving_average, smoothing_window
from bapo.analysis.report import describe, levels, main, ranges, share_moved, wall_time, write_comparison, write_report
from bapo.analysis.run_data import distinguish, points, round_starts

STEMS = ["clip_bounds", "clip_frac", "entropy", "grad_norm", "positive_ratio", "response_length", "reward", "staleness"]

CONFIG = """\
name: NAME
seed: 7
loss:
  _target_: bapo.losses.bapo.BapoLoss
  target_positive_ratio: 0.55
  clip_low: {_target_: bapo.losses.clip_bounds.BoundRange, start: 0.6, stop: 0.9, step: 0.02}
  clip_high: {_target_: bapo.losses.clip_bounds.BoundRange, start: 1.2, stop: 3.0, step: 0.05}
policy:
  _target_: bapo.policy.options.PolicyOptions
  path: org/model-0.6B
"""

PER_UPDATE = [
    *("policy/entropy", "policy/grad_norm", "policy/lr", "policy/clip_frac", "policy/clip_frac_high", "policy/clip_frac_low"),
    *("staleness/mean", "staleness/max", "bounds/positive_ratio", "bounds/positive_ratio_start"),
]
PER_ROUND = ["rollout/reward_mean", "rollout/response_length_correct_mean", "rollout/response_length_incorrect_mean"]


def make_run(folder: Path, name: str = "demo", config: bool = True, drop: str = "") -> Path:
    """Two rounds of two updates. clip_high leaves its start in updates 2 and 4, clip_low in update 4."""
    columns = [
        "trainer/global_step",
        "eval/test/avg@1",
        "rollout/round",
        "bounds/clip_low",
        "bounds/clip_high",
        *PER_UPDATE,
        *PER_ROUND,
    ]
    cells = [["0", "0.25", *[""] * (len(columns) - 2)]]
    for step, held_out, low, high in ((1, "", 0.6, 1.2), (2, "0.5", 0.6, 1.7), (3, "", 0.6, 1.2), (4, "0.375", 0.9, 3.0)):
        rolled = [str(0.125 * step)] * len(PER_ROUND) if step % 2 else [""] * len(PER_ROUND)
        row = [str(step), held_out, str((step - 1) // 2), str(low), str(high), *[str(step / 8)] * len(PER_UPDATE), *rolled]
        cells.append(row)
    keep = [index for index, column in enumerate(columns) if not drop or not re.match(drop, column)]
    folder.mkdir(parents=True)
    lines = [",".join(line[index] for index in keep) for line in (columns, *cells)]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    (folder / "timing.csv").write_text(
        "trainer/global_step,time/train,time/refill,perf/tokens_per_s\n1,30.0,60.0,1e9\n2,30.0,,1e9\n"
    )
    if config:
        (folder / "config.yaml").write_text(CONFIG.replace("NAME", name))
        (folder / "status.json").write_text('{"status": "finished"}')
    return folder


class Page(HTMLParser):
    """Checks that tags close in order; collects the table, the images and the text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.images: list[str] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        assert not {"href", "onclick", "onerror"} & set(values)
        assert tag not in ("script", "link", "iframe")
        if tag == "img":
            self.images.append(values["src"] or "")
        if tag not in ("img", "meta"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and self.open[-1] in ("th", "td"):
            self.rows[-1][-1] += data


def test_report_of_a_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    path = write_report(run)
    assert path == run / "report.html"
    html = path.read_text()
    page = Page(html)
    assert dict(page.rows) == {
        "status": "finished",
        "loss": "BapoLoss, target_positive_ratio 0.55, clip_low 0.6 to 0.9, clip_high 1.2 to 3.0",
        "model": "org/model-0.6B",
        "seed": "7",
        "updates": "4",
        "rounds": "2",
        "reward": "0.125 first, 0.375 last",
        "held-out test/avg@1": "0.250 first, 0.375 last, best 0.500 at update 2",
        "entropy (nats)": "0.125 first, 0.500 last",
        "mean clip_low": "0.675",
        "mean clip_high": "1.775",
        "staleness (updates)": "mean 0.3, maximum 0",
        "updates with a bound off its start": "50%",
        "time in updates, refills and evaluations": "2.0 min",
    }
    assert CONFIG.replace("NAME", "demo") in page.text
    assert "Not drawn" not in page.text
    assert "http://" not in html
    assert "https://" not in html

    files = sorted((run / "figures").iterdir())
    assert [file.stem for file in files] == STEMS
    images = {base64.b64decode(image.removeprefix("data:image/png;base64,")) for image in page.images}
    assert images == {file.read_bytes() for file in files}
    assert all(image.startswith(b"\x89PNG") and len(image) > 5000 for image in images)


def test_report_without_config_status_and_some_columns(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", config=False, drop="staleness/|policy/lr|eval/")
    (run / "figures").mkdir()
    (run / "figures/staleness.png").write_bytes(b"of an earlier report")
    page = Page(write_report(run).read_text())
    assert "Not drawn, as no run logged them: eval/*/avg@*, policy/lr, staleness/mean, staleness/max." in page.text
    assert sorted(file.stem for file in (run / "figures").iterdir()) == [stem for stem in STEMS if stem != "staleness"]
    assert [row[0] for row in page.rows][:2] == ["updates", "rounds"]
    assert "updates with a bound off its start" not in page.text


def test_a_hostile_name_is_text(tmp_path: Path) -> None:
    name = "<script>alert(1)</script><img src=x onerror=alert(2)> & \"quoted\" 'too'"
    run = make_run(tmp_path / "run", name="'" + name.replace("'", "''") + "'")
    html = write_report(run).read_text()
    page = Page(html)  # refuses a script, an event handler and a tag left open
    assert name in page.text
    assert len(page.images) == len(STEMS)


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with (run / "metrics.csv").open("a") as file:
        file.write("5,,2,0.6,1.")
    assert dict(Page(write_report(run).read_text()).rows)["updates"] == "4"


def test_a_run_with_nothing_to_show_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    (run / "metrics.csv").write_text("trainer/global_step,policy/loss\n")
    with pytest.raises(ValueError, match=r"metrics\.csv has no rows"):
        write_report(run)
    with pytest.raises(ValueError, match=r"metrics\.csv is missing; is .*other the folder of a run"):
        write_report(tmp_path / "other")
    with pytest.raises(SystemExit):
        main([str(run)])
    assert "has no rows" in capsys.readouterr().err


def test_comparison_of_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "a/0")
    (make_run(tmp_path / "b/1") / "config.yaml").write_text(CONFIG.replace("seed: 7", "seed: 8"))
    main([str(tmp_path / "a/0"), str(tmp_path / "b/1"), str(tmp_path / "b")])
    out, err = capsys.readouterr()
    assert out.strip() == str(tmp_path / "comparison.html")
    assert err.strip() == f"skipped, no metrics.csv in them: {tmp_path / 'b'}"
    page = Page((tmp_path / "comparison.html").read_text())
    assert page.rows[0] == ["", "name demo, seed 7", "name NAME, seed 8"]
    assert page.rows[1] == ["run folder", "a/0", "b/1"]
    assert ["mean clip_high", "1.775", "1.775"] in page.rows
    assert sorted(file.stem for file in (tmp_path / "comparison_figures").iterdir()) == STEMS
    assert not (tmp_path / "a/0/report.html").exists()

    (tmp_path / "b/1/config.yaml").write_text((tmp_path / "a/0/config.yaml").read_text())
    elsewhere = tmp_path / "elsewhere"
    assert write_comparison([tmp_path / "a/0", tmp_path / "b/1"], elsewhere) == elsewhere / "comparison.html"
    assert Page((elsewhere / "comparison.html").read_text()).rows[0] == ["", "a/0", "b/1"]


def test_share_of_updates_with_a_bound_off_its_start() -> None:
    loss = {"clip_low": {"start": 0.6}, "clip_high": {"start": 1.2}}
    rows = [
        {"bounds/clip_low": low, "bounds/clip_high": high} for low, high in ((0.6, 1.2), (0.62, 1.2), (0.6, 1.25), (0.6, 1.2))
    ]
    assert share_moved([{"eval/test/avg@1": 0.5}, *rows], ranges({"loss": loss})) == 0.5
    assert share_moved(rows, ranges({"loss": {"clip_low": 0.8, "clip_high": 1.2}})) is None


def test_levels_and_description_of_a_fixed_clip() -> None:
    config = {"loss": {"_target_": "bapo.losses.fixed_clip.FixedClipLoss", "clip_low": 0.8, "clip_high": 1.28}}
    assert levels(config) == {}
    assert describe(config["loss"]) == "FixedClipLoss, clip_low 0.8, clip_high 1.28"
    assert levels({"loss": {"target_positive_ratio": 0.4, "clip_high": {"start": 1.2, "stop": 3.0}}}) == {
        "bounds/clip_high": {1.2: "start"},
        "bounds/positive_ratio": {0.4: "target"},
    }


def test_points_and_averages() -> None:
    rows = [
        {"trainer/global_step": step, "rollout/round": step // 16} | ({"x": step * 2.0} if step % 3 else {})
        for step in range(1, 7)
    ]
    assert points(rows, "x") == ([1, 2, 4, 5], [2, 4, 8, 10])
    assert moving_average([1, 2, 6, 10], 3) == [3, 6]
    # 32 rounds of 16 updates: a window of one round, so what repeats every round leaves a flat line.
    rows = [{"trainer/global_step": step, "rollout/round": (step - 1) // 16, "x": step % 16} for step in range(1, 513)]
    assert smoothing_window(rows) == 16
    assert set(moving_average(points(rows, "x")[1], 16)) == {7.5}
    assert round_starts([{"trainer/global_step": 0, "rollout/round": 0}, *rows])[31] == 497


def test_every_evaluated_set_is_a_series() -> None:
    runs = [Run("one", [{"eval/b/avg@4": 1.0}]), Run("two", [{"eval/a/avg@1": 1.0, "eval/a/truncated_frac": 0.0}])]
    panel = Panel("", {"rollout/reward_mean": "reward", "eval/*/avg@*": ""})
    assert has(runs, panel) == {"eval/a/avg@1": "held-out: a avg@1", "eval/b/avg@4": "held-out: b avg@4"}
    assert missing(runs, Picture("", "", (panel,))) == ["rollout/reward_mean"]


def test_labels_of_a_sweep_over_losses_and_seeds() -> None:
    bapo = {"_target_": "bapo.losses.BapoLoss", "target_positive_ratio": 0.55, "clip_high": {"start": 1.2}}
    grpo, higher = ({"_target_": "bapo.losses.FixedClipLoss", "clip_low": 0.8, "clip_high": high} for high in (1.2, 1.28))
    configs = [{"loss": loss, "seed": seed, "lr": 0.1} for loss in (bapo, grpo, higher) for seed in (0, 1)]
    assert distinguish(configs) == [
        "BapoLoss, seed 0",
        "BapoLoss, seed 1",
        "FixedClipLoss, seed 0, clip_high 1.2",
        "FixedClipLoss, seed 1, clip_high 1.2",
        "FixedClipLoss, seed 0, clip_high 1.28",
        "FixedClipLoss, seed 1, clip_high 1.28",
    ]
    assert distinguish(configs[:1]) == distinguish([{}]) == [""]
    assert distinguish([{"a": 1}, {"a": 1}, {"a": 2}]) == ["a 1", "a 1", "a 2"]
    replay = {"schedule": {"replay": {"_target_": "x.Replay", "groups": 4}}}
    assert distinguish([{"schedule": {"replay": None}}, replay]) == ["no replay", "Replay"]


def test_a_pool_collected_in_the_background_counts_by_its_wait(tmp_path: Path) -> None:
    (tmp_path / "timing.csv").write_text(
        "trainer/global_step,time/train,time/refill,time/wait\n1,30.0,60.0,\n2,30.0,100.0,2.5\n3,30.0,,\n"
    )
    assert wall_time(tmp_path) == "2.5 min"  # 90 training, 60 refill in the foreground, 2.5 wait
