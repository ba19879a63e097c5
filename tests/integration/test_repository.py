"""The repository itself: what its top level holds, pinned requirements, sizes of files, and the Makefile's promises."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TOP_LEVEL = {
    *("conf", "src", "notebooks", "tests", "outputs", "benchmarks", "docs", "examples"),
    *(
        "README.md",
        "LICENSE",
        "Makefile",
        "pyproject.toml",
        "requirements-optuna.txt",
        "requirements-smollm2.txt",
        "requirements-vllm-cpu.txt",
        "requirements-vllm.txt",
        "requirements.txt",
        "requirements-dev.txt",
    ),
    *("train.py", "sft.py", "evaluate.py", ".gitignore", ".pre-commit-config.yaml", ".ci"),
}
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:work|root|home|Users)/[\w.]")
REGISTRY_HOST = re.compile(r"https?://[^/\s]*(?:pypi|pythonhosted|npmjs|debian|ubuntu|anaconda)")
PIN = re.compile(r"[\w.-]+(\[[\w,-]+\])?==\d+(\.\d+)*(\.post\d+)?")
MAX_MODULE_LINES, MAX_FUNCTION_LINES = 280, 60
README_LINES, README_COLUMNS = 130, 120


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """Paths of the files that git tracks in this checkout and that still exist."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: what belongs to the repository is unknown")
    listed = subprocess.run([git, "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip(f"git cannot list the files: {listed.stderr.strip()}")
    return [path for path in listed.stdout.split("\0") if path and (ROOT / path).is_file()]


def test_the_top_level_holds_what_the_readme_names_and_nothing_else(tracked: list[str]) -> None:
    assert {path.split("/")[0] for path in tracked} - TOP_LEVEL == set()
    assert [path for path in tracked if path.startswith("outputs/")] == ["outputs/.gitkeep"]


def test_no_file_names_a_machine_or_a_registry(tracked: list[str]) -> None:
    found = []
    for path in tracked:
        data = (ROOT / path).read_bytes()
        if b"\0" in data:  # a picture has no prose
            continue
        for number, line in enumerate(data.decode().splitlines(), 1):
            hits = (MACHINE_PATH.search(line), REGISTRY_HOST.search(line))
            found += [f"{path}:{number}: {hit.group()}" for hit in hits if hit]
    assert found == []


def test_the_search_for_machine_paths_and_registries_finds_them() -> None:
    for name in ("work", "root", "home", "Users"):
        assert MACHINE_PATH.search(f"cd /{name}/ada")
        assert MACHINE_PATH.search(f'path = "/{name}/.cache"')
        assert not MACHINE_PATH.search(f"frame{name}/{name}/ada, ./{name}/ada, /{name}/, /{name}s/ada")
    for name in ("pypi", "files.pythonhosted"):
        assert REGISTRY_HOST.search(f"from https://{name}.example/simple")
    assert not REGISTRY_HOST.search("https://arxiv.org/abs/2510.18927")


def requirement_lines(name: str) -> list[str]:
    lines = [line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    return [line for line in lines if line]


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-dev.txt"])
def test_every_requirement_is_pinned(name: str) -> None:
    loose = [line for line in requirement_lines(name) if not PIN.fullmatch(line)]
    included = {"requirements.txt": ["-e ."], "requirements-dev.txt": ["-r requirements.txt", "-r requirements-optuna.txt"]}
    assert loose == included[name]


def test_the_package_itself_is_installed_last() -> None:
    assert requirement_lines("requirements.txt")[-1] == "-e ."


def test_the_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= README_LINES
    assert [line for line in lines if len(line) > README_COLUMNS] == []


@pytest.mark.parametrize("path", sorted((ROOT / "src").rglob("*.py")), ids=lambda path: "/".join(path.parts[-2:]))
def test_modules_and_functions_are_short(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) <= MAX_MODULE_LINES
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in functions}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES} == {}


def test_ci_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().splitlines()[-1] == "make test"


# The Makefile, tried in a folder whose requirements are empty, so that pip needs no network.

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    outer = ("MAKE", "MFLAGS", "ARGS", "PYTHON")  # what a make that runs these tests hands down
    environment = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    return subprocess.run(["make", *arguments], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("requirements.txt", "requirements-dev.txt", "pyproject.toml"):
        (tmp_path / name).touch()
    (tmp_path / "train.py").write_text("import sys\nprint(sys.prefix, sys.argv[1:])\n")
    return tmp_path


@needs_make
def test_make_alone_lists_every_target(checkout: Path) -> None:
    lines = make(checkout).stdout.splitlines()[1:]
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets
    assert [line.split()[0] for line in lines] == targets[1].split()


@needs_make
@pytest.mark.slow
def test_make_train_installs_once_and_again_after_a_change_or_a_failure(checkout: Path) -> None:
    train = ("train", f"PYTHON={sys.executable}", "ARGS=loss=grpo seed=3")
    ran = f"{checkout / '.venv'} ['loss=grpo', 'seed=3']"
    first, second = make(checkout, *train), make(checkout, *train)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "making .venv" in first.stdout
    assert "installing" in first.stdout
    assert ran in first.stdout
    assert second.stdout.splitlines() == [".venv/bin/python train.py loss=grpo seed=3", ran]

    (checkout / "requirements.txt").write_text("-r missing.txt\n")
    broken, again = make(checkout, *train), make(checkout, *train)
    assert broken.returncode == again.returncode == 2
    assert ran not in broken.stdout + again.stdout
    assert "installing" in again.stdout

    (checkout / "requirements.txt").write_text("")
    mended = make(checkout, *train)
    assert "making" not in mended.stdout
    assert "installing" in mended.stdout
    assert ran in mended.stdout


@needs_make
@pytest.mark.parametrize(
    ("python", "message"),
    [
        ("no-such-python", "error: there is no no-such-python; install Python 3.11 or newer"),
        ("./old", "error: ./old is Python 3.9.2; Python 3.11 or newer is needed"),
    ],
)
def test_make_refuses_a_missing_or_old_python(checkout: Path, python: str, message: str) -> None:
    old = checkout / "old"
    old.write_text('#!/bin/sh\nif [ "$1" = --version ]; then echo Python 3.9.2; else exit 1; fi\n')
    old.chmod(0o755)
    refused = make(checkout, "train", f"PYTHON={python}")
    assert refused.returncode == 2
    assert message in refused.stderr
    assert not (checkout / ".venv").exists()
