"""The notebooks run, from top to bottom, on a real run folder, and are committed without outputs."""

import json
from pathlib import Path

import matplotlib
import pytest
from support import REPOSITORY, SMALL, run_experiment

NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))


def code_of(notebook: Path) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.name)
def test_notebook_runs(notebook, cache_dir, tmp_path, monkeypatch, capsys):
    run_experiment(tmp_path, *SMALL, f"policy.warm_start.cache_dir={cache_dir}", "trainer.max_rounds=1")
    monkeypatch.setenv("RUN_DIR", str(tmp_path))
    matplotlib.use("Agg")
    capsys.readouterr()
    names: dict = {}
    for source in code_of(notebook):
        exec(compile(source, notebook.name, "exec"), names)
    printed = capsys.readouterr().out
    assert "4 updates" in printed
    assert printed.count("reward") == 8
    assert names["staleness"] == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.name)
def test_notebook_holds_no_outputs(notebook):
    cells = json.loads(notebook.read_text())["cells"]
    assert cells
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
