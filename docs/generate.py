"""Write the generated tables of docs/ (make docs); with --check only name the pages that are out of date."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from bapo import metrics

DOCS = Path(__file__).parent
CONF = DOCS.parent / "conf"
EQUIVALENCE = DOCS.parent / "tests" / "data" / "equivalence.json"

BLOCK = re.compile(r"(<!-- generated: (\w+) .*?-->\n).*?(<!-- end -->)", re.DOTALL)
"""A generated part: its opening line names the function of `PARTS` that writes it."""


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; a bar inside a cell is escaped."""
    cells = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(str(cell).replace("|", r"\|") for cell in row) + " |\n" for row in cells)


def names(group: str, pattern: str = "*") -> list[str]:
    """Files of a config group, sorted, without bases such as `_dataset`."""
    return sorted(path.stem for path in (CONF / group).glob(f"{pattern}.yaml") if not path.stem.startswith("_"))


def values(group: str, name: str) -> dict[str, Any]:
    """conf/<group>/<name>.yaml with its defaults, as plain values."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        section = OmegaConf.to_container(compose(f"{group}/{name}")[group])
    assert isinstance(section, dict)
    return {str(key): value for key, value in section.items()}


def head(group: str, name: str) -> str:
    """The comment at the head of a YAML file, without its indented command lines and Hydra's `@package`."""
    lines = re.match(r"(?:#.*\n)*", (CONF / group / f"{name}.yaml").read_text())
    assert lines
    text = [line[1:] for line in lines[0].splitlines() if not re.match(r"#   | *# @package", line)]
    return " ".join(line.strip() for line in text)


def first_clause(text: str) -> str:
    """A text up to its first full stop or colon."""
    return re.split(r": |\.(?:\s+(?=[A-Z])|$)", text)[0]


def presets() -> str:
    """Table of the presets of BAPO itself."""
    rows = []
    for name in names("loss", "bapo*"):
        loss = values("loss", name)
        ranges = (":".join(str(loss[key][part]) for part in ("start", "stop", "step")) for key in ("clip_low", "clip_high"))
        dual = "off" if loss["dual_clip"] is None else str(loss["dual_clip"])
        dual += "" if loss["dual_clip"] is None or loss["dual_clip_in_search"] else ", in the loss only"
        masses, target = f"{loss['mass']} / {loss['weight']}", f"{loss['target_positive_ratio']:.4g}"
        rows.append([f"`{name}`", target, *ranges, loss["search_order"], masses, dual, first_clause(head("loss", name))])
    return table(["preset", "target", "clip_low", "clip_high", "order", "mass / weight", "dual clip", "what it is"], rows)


def others() -> str:
    """Table of every other loss."""
    rows = []
    for name in names("loss"):
        if not name.startswith("bapo"):
            loss = values("loss", name)
            target = loss.pop("_target_").rpartition(".")[2]
            options = ", ".join(f"{key} {value}" for key, value in loss.items() if value is not None)
            rows.append([f"`{name}`", f"`{target}`", options])
    return table(["file of `conf/loss/`", "class", "values"], rows)


def advantages() -> str:
    """Table of the advantages."""
    rows = [
        [f"`{n}`", f"`{values('advantage', n)['_target_'].rpartition('.')[2]}`", head("advantage", n)]
        for n in names("advantage")
    ]
    return table(["`advantage=`", "class", "what it is"], rows)


def tasks() -> str:
    """Table of the tasks."""
    rows = []
    for name in names("task"):
        task = values("task", name)
        data = f"`{task['path']}`" if task.get("path") else ""
        rows.append([f"`{name}`", head("task", name), data, f"`{task['revision'][:7]}`" if task.get("revision") else ""])
    return table(["`task=`", "what it is", "data set", "revision"], rows)


def equivalence() -> str:
    """Table of tests/data/equivalence.json: pairs of answers and why they are the same or not."""
    rows = []
    for row in json.loads(EQUIVALENCE.read_text()):
        same, other = ("yes" if row[key] else "no" for key in ("same", "math_verify"))
        pair = [f"`{row[key]}`" for key in ("gold", "answer")]
        rows.append([row["topic"], *pair, same, "" if other == same else other, row["why"]])
    return table(["topic", "gold", "answer", "the same?", "math-verify alone", "because"], rows)


def registry() -> str:
    """Table of every metric of `bapo.metrics`; those with a free part in their name come last."""
    entries = [*metrics.METRICS.values(), *(metric for _, metric in metrics._PATTERNS)]
    rows = [[f"`{m.name}`", m.formula, m.unit, m.reduction] for m in entries]
    return table(["name", "formula", "unit", "reduction"], rows)


PARTS: dict[str, Callable[[], str]] = {
    part.__name__: part for part in (presets, others, advantages, tasks, equivalence, registry)
}


def generated(text: str) -> str:
    """A page with its generated parts written anew."""
    return BLOCK.sub(lambda block: f"{block[1]}\n{PARTS[block[2]]()}\n{block[3]}", text)


def main(arguments: Sequence[str], folder: Path = DOCS) -> int:
    """Exit status: 1 if --check finds a page out of date, 2 for an unknown argument, else 0."""
    if set(arguments) - {"--check"}:
        print("usage: python docs/generate.py [--check]", file=sys.stderr)
        return 2
    pages = {page: generated(text) for page in sorted(folder.glob("*.md")) if BLOCK.search(text := page.read_text())}
    stale = [page for page, text in pages.items() if text != page.read_text()]
    for page in stale:
        if arguments:
            print(f"{page} is out of date; run: make docs", file=sys.stderr)
        else:
            page.write_text(pages[page])
            print(f"{page} rewritten")
    return 1 if stale and arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
