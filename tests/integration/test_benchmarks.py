"""The benchmarks run, here on few tokens, and the searches that they time agree."""

from pathlib import Path

import pytest
from support import REPOSITORY


def test_bound_search_writes_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    import bound_search

    bound_search.main(many=4096, tokens=64, vocabulary=50, results=tmp_path / "results.md")
    written = (tmp_path / "results.md").read_text()
    assert written == capsys.readouterr().out
    rows = [line.split(" | ") for line in written.splitlines() if line.startswith("| ")]
    names = [row[0].removeprefix("| ") for row in rows]
    assert names == [
        "search", "table", "(a) every candidate at once", "(b) one at a time", "(c) one at a time, leanest", "loss", "bapo",
        "fixed clip",
    ]  # fmt: skip
    assert all(float(row[1]) > 0 for row in rows if row[1] != "ms")


def test_the_results_are_those_of_the_committed_sizes() -> None:
    written = (REPOSITORY / "benchmarks" / "results" / "bound_search.md").read_text()
    assert "1,048,576 tokens, the paper's ranges (52 candidates)" in written
    assert "8192 tokens over a vocabulary of 32000" in written


def test_record_cost_measures_what_it_writes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    import record_cost

    record_cost.write_table([(4, 8), (16, 64)], repeats=2)
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][2:]
    assert [row[0] for row in rows] == ["| 32", "| 1,024"]
    assert all(float(row[1]) > 0 for row in rows)
    assert float(rows[1][2].rstrip(" |")) < 20


@pytest.mark.slow
def test_overlap_compares_two_runs(cache_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    import overlap

    small = ["+experiment=smoke", f"policy.warm_start.cache_dir={cache_dir}", "trainer.max_rounds=5"]
    overlap.compare(1, small, repeats=1)
    epochs, generation, training, sequential, background, ratio, best = (
        cell.split()[0] for cell in capsys.readouterr().out.strip("| \n").split("|")
    )
    assert epochs == "1"
    assert all(float(seconds) > 0 for seconds in (generation, training, sequential, background))
    assert float(ratio) == pytest.approx(float(sequential) / float(background), rel=0.1)
    assert 1 <= float(best) <= 2
