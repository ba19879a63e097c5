"""What README.md says is so: its commands run (shortened), its files, keys, metrics and links are there."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from support import REPOSITORY, run_experiment
from support.commands import commands, two_jobs
from support.configs import composed, shrunk, warm_model, without_hydra
from support.evaluations import TASK, WARM
from support.evaluations import composed as evaluation
from support.sft import TINY, fine_tune
from support.task_files import local_data

from bapo.evaluation.run import run as evaluate
from bapo.training.config_check import all_keys

README = (REPOSITORY / "README.md").read_text()
PYTHON = ("python", ".venv/bin/python")


BENCHMARKS = re.findall(
    r"^    import (\w+)$", (REPOSITORY / "tests" / "integration" / "test_benchmarks.py").read_text(), re.MULTILINE
)
"""Those that tests/test_benchmarks.py runs."""


def kind(command: str) -> str:
    """Which test runs or checks a command."""
    match shlex.split(command):
        case [python, "train.py", *rest] if python in PYTHON:
            return "sweep" if "-m" in rest or "--multirun" in rest else "run"
        case [python, "evaluate.py" | "sft.py" as script, *_] if python in PYTHON:
            return script.removesuffix(".py")
        case [python, "-m", module, *_] if python in PYTHON and module.split(".")[0] == "bapo":
            return "module"
        case [python, script] if python in PYTHON and (
            REPOSITORY / "tests" / "integration" / "test_benchmarks.py"
        ).read_text().count(Path(script).stem):
            return "benchmark"
        case ["make", *_]:
            return "make"
        case ["python3", "-m", "venv", ".venv"]:
            return "venv"
        case [".venv/bin/pip", "install", *_]:
            return "pip"
    return "unknown"


COMMANDS = commands(README)


def of(*kinds: str) -> list[str]:
    return [command for command in COMMANDS if kind(command) in kinds]


def test_commands_are_found_in_blocks_and_in_prose() -> None:
    block = "```bash\n# note\n$ python train.py a=1 \\\n  'b=[1,2]'  # why\n\n```"
    text = f"Say `make x` or `kill 1`.\n{block}\n```text\nls\n```\n"
    assert commands(text) == ["python train.py a=1 'b=[1,2]'", "make x"]
    kinds = {"python train.py": "run", "python train.py -m a=1,2": "sweep", "curl x": "unknown", "python other.py": "unknown"}
    assert {command: kind(command) for command in kinds} == kinds


def test_every_command_is_of_a_kind_that_is_tested() -> None:
    assert of("unknown") == [], "give each a kind and a test, or leave it out of README.md"
    assert {"run", "sweep", "make", "pip"} <= {kind(command) for command in COMMANDS}


@pytest.fixture(scope="module")
def run_folders(cache_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two finished runs."""
    folders = [tmp_path_factory.mktemp("run") for _ in range(2)]
    for seed, folder in enumerate(folders):
        run_experiment(folder, *shrunk(cache_dir=cache_dir), f"seed={seed}")
    return [str(folder) for folder in folders]


@pytest.fixture
def arguments(request: pytest.FixtureRequest, cache_dir: Path, run_folders: list[str]) -> list[str]:
    """The words of the command behind its program, placeholders filled in."""
    waiting = list(run_folders)
    filled = []
    for word in shlex.split(request.param)[2:]:
        if "RUN_DIR" in word:
            word = word.replace("RUN_DIR", waiting.pop(0))
        if "PATH_OR_HUB_ID" in word:
            word = word.replace("PATH_OR_HUB_ID", str(warm_model(cache_dir)))
        filled.append(word.replace("=NAME", "=smoke"))
    return filled


RUNS = [pytest.param(c, id=c, marks=[pytest.mark.slow] if "rollout=vllm" in c else []) for c in of("run")]


@pytest.mark.parametrize("arguments", RUNS, indirect=True)
def test_a_run_of_the_readme_trains(
    arguments: list[str], cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_ins, capsys
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    if "explain=true" in arguments:
        assert run_experiment(tmp_path / "run", *arguments) == {}
        assert "parameters" in capsys.readouterr().out
        assert not (tmp_path / "run").exists()
        return
    if "experiment=bapo_qwen06b" in arguments:  # on vLLM itself in test_vllm_runs.py
        arguments += stand_ins(*arguments)
    resumed = [argument.removeprefix("resume=") for argument in arguments if argument.startswith("resume=")]
    if resumed:
        assert run_experiment(Path(resumed[0]), *arguments)["trainer/global_step"] == 2
        return
    metrics = run_experiment(tmp_path, *shrunk(*arguments, cache_dir=cache_dir))
    assert metrics["trainer/global_step"] == 2
    assert (tmp_path / "report.html").is_file()


@pytest.mark.parametrize("arguments", of("evaluate"), indirect=True, ids=of("evaluate"))
def test_an_evaluation_of_the_readme_scores(arguments: list[str], cache_dir: Path, tmp_path: Path, byte_model) -> None:
    small = [
        "max_problems=2",
        "samples=2",
        "sampling.max_tokens=4",
        f"cache_dir={cache_dir}",
        f"output_dir={tmp_path / 'eval'}",
    ]
    if not arguments:
        small += [*TASK, *WARM]
    if "benchmark=aime24" in arguments:  # on vLLM itself in test_evaluate_entry.py
        arguments = [f"policy={byte_model}" if a.startswith("policy=") else a for a in arguments if a != "rollout=vllm"]
        small += [f"benchmark.aime24.{override.removeprefix('task.')}" for override in local_data("aime24", tmp_path)]
    (result,) = evaluate(evaluation(*arguments, *small))
    assert result["responses"] == 4
    assert 0 <= result["metrics"]["avg@2"]["value"] <= 1


@pytest.mark.parametrize("arguments", of("sft"), indirect=True, ids=of("sft"))
def test_fine_tuning_of_the_readme_makes_a_model(arguments: list[str], tmp_path: Path) -> None:
    fine_tune(tmp_path, *arguments, *TINY)
    assert (tmp_path / "model" / "config.json").is_file()


def test_a_sweep_is_cut_to_two_jobs() -> None:
    assert two_jobs(["a=1,2,3", "b=5,6", "c=[1,2]"]) == (["a=1,2", "b=5", "c=[1,2]"], ["a=1", "b=5", "c=[1,2]"])
    sweep, job = two_jobs(["+sweep=losses"])
    assert sweep == ["+sweep=losses", "loss=bapo_digit_ops,grpo", "seed=0"]
    assert job == ["+sweep=losses", "loss=bapo_digit_ops", "seed=0"]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", of("sweep"), indirect=True, ids=of("sweep"))
def test_a_sweep_of_the_readme_trains(arguments: list[str], cache_dir: Path, tmp_path: Path) -> None:
    sweep, job = two_jobs([argument for argument in arguments if argument not in ("-m", "--multirun")])
    sizes = shrunk(*job, cache_dir=cache_dir)[len(job) :]
    command = [sys.executable, str(REPOSITORY / "train.py"), "-m", *sweep, *sizes]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"WANDB_MODE": "offline"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    reports = tmp_path.glob("outputs/sweeps/*/*/[0-9]/report.html")
    assert sorted(path.parent.name for path in reports) == ["0", "1"]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", of("module"), indirect=True, ids=of("module"))
def test_a_module_of_the_readme_runs(arguments: list[str], tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", of("make"))
def test_make_has_the_target_and_its_arguments_compose(command: str) -> None:
    targets = re.search(r"^\.PHONY: (.*)$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert targets
    given = [word for word in shlex.split(command)[1:] if "=" not in word]
    assert set(given) <= set(targets[1].split())
    for word in shlex.split(command)[1:]:
        if word.startswith("ARGS=") and given == ["train"]:
            composed(*shlex.split(word.removeprefix("ARGS=")))


@pytest.mark.parametrize("command", of("pip"))
def test_pip_installs_from_files_that_are_there(command: str) -> None:
    given = shlex.split(command)[2:]
    files = [file for option, file in itertools.pairwise(given) if option in ("-r", "--requirement")]
    assert files
    assert [file for file in files if not (REPOSITORY / file).is_file()] == []


# What stands in backticks, and links.

SPANS = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", README, flags=re.MULTILINE | re.DOTALL))


def test_every_path_is_there() -> None:
    paths = [span for span in SPANS if re.fullmatch(r"(conf|src|tests|docs|notebooks|benchmarks)(/[\w.*-]*)+", span)]
    assert len(paths) > 10
    assert [path for path in paths if "my_" not in path and not list(REPOSITORY.glob(path))] == []
    files = {span for span in SPANS if re.fullmatch(r"(?!my_)[\w-]+\.(py|toml|md|txt)", span)}
    assert [name for name in files if not any(REPOSITORY.glob(name)) and not any((REPOSITORY / "src").rglob(name))] == []


def test_every_relative_link_is_there() -> None:
    links = re.findall(r"\]\(([^)\s]+)[^)]*\)|<img[^>]*src=\"([^\"]+)\"", README)
    relative = [link for pair in links for link in pair if link and not re.match(r"\w+:|#", link)]
    assert [link for link in relative if not (REPOSITORY / link.split("#")[0]).exists()] == []


def test_every_config_key_in_a_table_is_one() -> None:
    known = all_keys(OmegaConf.to_container(without_hydra(composed())))
    known |= all_keys(OmegaConf.to_container(without_hydra(composed("rollout=vllm_server"))))
    groups = "|".join(key for key in known if "." not in key)
    rows = "\n".join(line for line in README.splitlines() if line.startswith("|"))
    keys = re.findall(rf"`((?:{groups})\.[\w.]+)[^`\n]*`", rows)
    assert keys
    assert set(keys) - known == set()
