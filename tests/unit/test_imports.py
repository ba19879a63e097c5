"""Who may import whom inside the package, and what no module may do, read from the syntax tree."""

import ast
import importlib.metadata
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "bapo"

# A row is a module or a folder directly below src/bapo, with the rows it may import. A row imports only rows above it.
ROWS: dict[str, set[str]] = {
    "__init__": set(),
    "files": set(),
    "types": set(),
    "protocols": {"types"},
    "metrics": {"types"},
    "ops": {"types"},
    "losses": {"types", "protocols", "ops"},
    "advantages": {"types"},
    "tasks": {"files", "types", "protocols"},
    "policy": {"files", "types", "protocols", "ops"},
    "rollouts": {"files", "types", "protocols", "tasks", "advantages"},
    "engines": {"files", "types", "protocols", "policy", "rollouts"},
    "data": {"types", "protocols", "rollouts", "engines"},
    "optimizer": set(),
    "updates": {"policy", "metrics", "optimizer"},
    "module": {"types", "protocols", "ops", "losses", "policy", "metrics", "optimizer", "updates"},
    "records": {"files", "types", "ops", "losses"},
}
CORE = set(ROWS)
ROWS["training"] = CORE
ROWS["export"] = CORE | {"training"}
ROWS["sft"] = CORE | {"training", "export"}
ROWS["evaluation"] = CORE | {"training", "export", "sft"}
ROWS["analysis"] = CORE | {"training", "evaluation"}

# The mathematics stands on torch alone, so that it can be read, tested and reused without a trainer.
THIRD_PARTY: dict[str, set[str]] = {
    "__init__": set(),
    "files": set(),
    "types": {"torch"},
    "protocols": {"torch"},
    "metrics": {"torch"},
    "ops": {"torch"},
    "losses": {"torch"},
    "advantages": {"torch"},
    "optimizer": {"torch"},
}

UNSAFE_MODULES = {"pickle", "cloudpickle", "dill", "shelve", "marshal"}
UNSAFE_VALUES = {
    "trust_remote_code": "True",  # runs code from a model's folder: only a user may ask for it
    "weights_only": "False",  # unpickles whatever a checkpoint holds
    "allow_pickle": "True",
}


def sources() -> list[tuple[str, str]]:
    """(path below src/bapo, source text) of every module."""
    return [(path.relative_to(PACKAGE).as_posix(), path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))]


def row_of(path: str) -> str:
    return path.split("/")[0].removesuffix(".py")


def imported(tree: ast.AST, path: str) -> Iterator[str]:
    """Full dotted names that a module of the package imports, wherever in it; `from bapo import x` counts as bapo.x."""
    parents = ["bapo", *path.split("/")[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def direction_faults(path: str, source: str) -> list[str]:
    """Imports that go against ROWS or THIRD_PARTY, one sentence each."""
    row, faults = row_of(path), []
    for name in imported(ast.parse(source), path):
        top, *rest = name.split(".")
        if top == "bapo":
            target = rest[0] if rest and rest[0] in ROWS else "__init__"
            if target not in ROWS[row] | {row, "__init__"}:
                faults.append(f"{path} imports {name}: {row} may import {sorted(ROWS[row]) or 'nothing'} of the package")
        elif row in THIRD_PARTY and top not in THIRD_PARTY[row] | sys.stdlib_module_names:
            faults.append(f"{path} imports {name}: besides the standard library {row} may import {sorted(THIRD_PARTY[row])}")
    return faults


def module_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run on import: everything outside function bodies and `if TYPE_CHECKING`."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            waiting += node.orelse
            continue
        if isinstance(node, ast.stmt):
            yield node
        waiting += ast.iter_child_nodes(node)


def eager_vllm(source: str) -> bool:
    """Whether importing this module would import vllm."""
    for node in module_level(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if any(name.split(".")[0] == "vllm" for name in names):
            return True
    return False


def unsafe_code(path: str, source: str) -> list[str]:
    """Unsafe settings written as literals, in a call, a default or a dict, and imports of modules that run what they load."""
    tree = ast.parse(source)
    text = ast.unparse(tree)  # without comments, one spelling
    found = [name for name in imported(tree, path) if name.split(".")[0] in UNSAFE_MODULES]
    return found + [
        f"{name}={value}"
        for name, value in UNSAFE_VALUES.items()
        if re.search(rf"\b{name}\b'?\s*(: bool )?[=:]\s*{value}\b", text)
    ]


def test_every_module_belongs_to_a_row() -> None:
    rows = {row_of(path) for path, _ in sources()}
    unknown = sorted(rows - set(ROWS))
    assert not unknown, f"{unknown}: add each to ROWS in tests/test_imports.py, below everything it imports"
    assert set(ROWS) == rows, f"{sorted(set(ROWS) - rows)}: in ROWS of tests/test_imports.py, but not in src/bapo"


def test_a_row_allows_only_rows_above_it() -> None:
    above: set[str] = set()
    for row, allowed in ROWS.items():
        assert allowed <= above, f"{row} allows {sorted(allowed - above)}, which stand below it"
        above.add(row)


@pytest.mark.parametrize(("path", "source"), [pytest.param(*module, id=module[0]) for module in sources()])
def test_imports_go_upwards(path: str, source: str) -> None:
    assert direction_faults(path, source) == []


@pytest.mark.parametrize(
    ("path", "source", "fault"),
    [
        ("losses/new.py", "from bapo.policy.causal_lm import CausalLMPolicy", "bapo.policy"),
        ("losses/new.py", "def f():\n    import bapo.rollouts.pool as p", "bapo.rollouts.pool"),
        ("losses/new.py", "from ..module import BapoModule", "bapo.module"),
        ("losses/new.py", "from bapo import metrics", "bapo.metrics"),
        ("losses/new.py", "import numpy as np", "numpy"),
        ("data/new.py", "if TYPE_CHECKING:\n    from bapo.module import BapoModule", "bapo.module"),
        ("data/new.py", "from bapo.training.train import build_parts", "bapo.training.train"),
        ("types.py", "from .metrics import METRICS", "bapo.metrics"),
    ],
)
def test_the_check_sees_a_wrong_import(path: str, source: str, fault: str) -> None:
    (message,) = direction_faults(path, source)
    assert message.startswith(f"{path} imports {fault}")


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "losses/new.py",
            "import math, torch.nn\nfrom bapo.ops.masked import masked_sum\nfrom .surrogate import importance_ratio",
        ),
        ("training/run_folder.py", "from bapo import __version__\nimport omegaconf"),
        ("training/fit.py", "from bapo.training import config_check\nfrom bapo.engines.hf import HFEngine"),
    ],
)
def test_the_check_lets_a_right_import_pass(path: str, source: str) -> None:
    assert direction_faults(path, source) == []


def test_vllm_is_imported_only_where_it_is_used() -> None:
    assert [path for path, source in sources() if eager_vllm(source)] == []
    assert eager_vllm("try:\n    from vllm import LLM\nexcept ImportError:\n    LLM = None")
    assert eager_vllm("class Engine:\n    import vllm.envs")
    assert not eager_vllm("import vllmish\nif TYPE_CHECKING:\n    import vllm\ndef load():\n    import vllm")


def test_nothing_unpickles_or_trusts_remote_code_by_itself() -> None:
    assert {path: found for path, source in sources() if (found := unsafe_code(path, source))} == {}
    configs = {path.name: path.read_text() for path in (ROOT / "conf").rglob("*.yaml")}
    assert [name for name, text in configs.items() if re.search(r"trust_remote_code:\s*true", text, re.IGNORECASE)] == []


@pytest.mark.parametrize(
    "source",
    [
        "load(path, trust_remote_code=True)",
        "class Options:\n    trust_remote_code: bool = True",
        "options = {'trust_remote_code': True}",
        "torch.load(path, weights_only = False)",
        "np.load(path, allow_pickle=True)",
        "def f():\n    from pickle import loads",
    ],
)
def test_the_check_sees_unsafe_code(source: str) -> None:
    assert len(unsafe_code("new.py", source)) == 1
    assert unsafe_code("new.py", source.replace("True", "asked").replace("False", "True").replace("pickle", "json")) == []


def distribution_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_what_the_code_imports_is_in_requirements_txt() -> None:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pinned = {distribution_name(line.split("==")[0]) for line in lines if "==" in line}
    owners = importlib.metadata.packages_distributions()
    known = sys.stdlib_module_names | {"bapo", "vllm"}  # vllm is optional, and imported only where it is used
    for path, source in sources():
        for package in {name.split(".")[0] for name in imported(ast.parse(source), path)} - known:
            needed = {distribution_name(owner) for owner in owners.get(package, [])}
            assert needed & pinned, f"{path} imports {package} ({sorted(needed)}), which requirements.txt does not pin"
