"""A sweep as a table: seeds averaged, settings apart. By hand."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bapo.analysis.sweep import late_mean, main, runs_below, table


def run(folder: Path, lag: int, seed: int, rewards: list[float], status: str = "finished") -> Path:
    """Two updates a round; the held-out score is known after every second round."""
    folder.mkdir(parents=True)
    lines = ["trainer/global_step,rollout/reward_mean,policy/entropy,eval/test/avg@1", f"0,,,{rewards[0] / 2}"]
    for index, reward in enumerate(rewards):
        lines += [f"{2 * index + 1},{reward},{reward + 1},", f"{2 * index + 2},,{reward + 2},{reward / 2 if index % 2 else ''}"]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    (folder / "config.yaml").write_text(
        f"name: n{seed}\nseed: {seed}\nloss: {{a: 1}}\nschedule: {{lag: {lag}, overlap: false}}\n"
    )
    (folder / "status.json").write_text(f'{{"status": "{status}"}}')
    return folder


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    run(tmp_path / "0", 0, 0, [0.0, 0.0, 0.2, 0.4])
    run(tmp_path / "1", 0, 1, [0.0, 0.0, 0.6, 0.8])
    run(tmp_path / "2", 4, 0, [0.0, 0.0, 0.2, 0.2])
    (tmp_path / "2" / "checkpoints").mkdir()
    return tmp_path


def test_the_late_mean_is_of_the_last_updates() -> None:
    rows = [{"trainer/global_step": float(step), "a": float(step)} for step in range(9)]
    assert late_mean(rows, "a", 0.25) == 7.5
    assert late_mean(rows, "a", 1) == 4.5  # not the row before the first update
    assert late_mean(rows, "b", 1) is None


def test_seeds_are_averaged_and_settings_are_not(sweep: Path) -> None:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table(runs_below([sweep]), 0.5).splitlines()]
    names = [
        "runs",
        "seeds",
        "updates",
        "eval/test/avg@1",
        "rollout/reward_mean",
        "policy/entropy",
        "policy/clip_frac",
        "staleness/mean",
    ]
    assert lines[0] == names
    # Over the last 4 of 8 updates: rewards 0.3 and 0.7, entropies a reward and 1.5, the held-out score at the end 0.2 and 0.4.
    assert lines[2] == ["lag 0", "2", "8", "0.300 (0.141)", "0.500 (0.283)", "2.000 (0.283)", "", ""]
    assert lines[3] == ["lag 4", "1", "8", "0.100", "0.200", "1.700", "", ""]


def test_the_command_takes_several_folders_and_chosen_metrics(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(sweep / "3", 4, 1, [0.0, 1.0], status="failed")
    (run(sweep / "4", 4, 2, [0.0], status="failed") / "metrics.csv").write_text("trainer/global_step\n")
    main([str(sweep / "2"), str(sweep / "3"), str(sweep), "--last", "0.5", "--metric", "rollout/reward_mean"])
    said = capsys.readouterr()
    assert said.err == f"warning: without an update: {sweep / '4'}\nwarning: not finished: {sweep / '3'}\n"
    assert said.out.splitlines()[2:] == ["| lag 0 | 2 | 8 | 0.500 (0.283) |", "| lag 4 | 2 | 4 to 8 | 0.600 (0.566) |"]
    main([str(sweep / "0")])
    assert capsys.readouterr().out.splitlines()[2].startswith("| all | 1 | 8 |")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{}/none"], "there is no run with an update in or below it"),
        (["{}", "--last", "0"], r"--last is 0.0; it must be in (0, 1]"),
        (["{}", "--metric", "policy/entrop"], "nearest: 'policy/entropy'"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, message, sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([word.format(sweep) for word in arguments])
    assert message in capsys.readouterr().err


def test_a_section_is_another_setting_than_null_and_a_run_that_is_there_twice_is_said(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, partial in (("3", "null"), ("4", "{_target_: bapo.rollouts.groups.PartialRollouts, tokens_per_round: 8}")):
        config = run(sweep / name, 7, 0, [0.0, 1.0]) / "config.yaml"
        config.write_text(config.read_text() + f"rollout: {{partial: {partial}}}\n")
    shutil.copytree(sweep / "4", sweep / "5")
    main([str(sweep / "3"), str(sweep / "4"), str(sweep / "5"), "--last", "1", "--metric", "rollout/reward_mean"])
    said = capsys.readouterr()
    assert said.err == f"warning: the same settings and seed: {sweep / '4'} and {sweep / '5'}\n"
    assert said.out.splitlines()[2:] == ["| PartialRollouts | 1 | 4 | 0.500 (0.000) |", "| no partial | 1 | 4 | 0.500 |"]


def test_a_value_that_is_not_a_number_stays_one(sweep: Path) -> None:
    run(sweep / "3", 0, 2, [0.0, 0.0, 0.0, float("nan")])
    assert table(runs_below([sweep]), 0.25, ["rollout/reward_mean"]).splitlines()[2] == "| lag 0 | 3 | 8 | nan (nan) |"
