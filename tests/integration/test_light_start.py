"""What answers at once imports nothing heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support import REPOSITORY

HEAVY = ("torch", "lightning", "transformers", "matplotlib", "wandb", "peft", "datasets", "math_verify", "sympy")


def imported_by(code: str, *arguments: str) -> list[str]:
    """The heavy packages that are in sys.modules after the code, run as train.py's process would."""
    end = f"\nimport sys\nprint('HEAVY', *[name for name in {HEAVY} if name in sys.modules])"
    source = f"import sys\nsys.argv = ['train.py', *{list(arguments)!r}]\ntry:\n    {code}\nexcept SystemExit:\n    pass{end}"
    done = subprocess.run([sys.executable, "-c", source], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1].split()[1:]


@pytest.mark.parametrize("module", ["bapo", "bapo.training.cli", "bapo.training.job", "bapo.training.trainer"])
def test_the_front_door_imports_nothing_heavy(module: str) -> None:
    assert imported_by(f"import {module}") == []


@pytest.mark.parametrize("arguments", [["--help"], ["--cfg", "job"], ["modle.lr=1"]])
def test_an_answer_without_a_run_imports_nothing_heavy(arguments: list[str]) -> None:
    code = "import runpy; runpy.run_path('train.py', run_name='__main__')"
    assert imported_by(code, *arguments) == []


@pytest.mark.parametrize("argument", ["loss.clip_low.start=2", "+trainer.max_epochs=3", "optimizer.lr=0", "seed=-1"])
def test_a_refused_value_costs_torch_alone(argument: str) -> None:
    code = "import runpy; runpy.run_path('train.py', run_name='__main__')"
    assert imported_by(code, argument, "hydra.run.dir=outputs/never") == ["torch"]
