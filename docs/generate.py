"""Rewrites the generated tables in docs/: python docs/generate.py. With --check it only asks whether they are stale."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from bapo import metrics

DOCS = Path(__file__).parent
LOSSES = DOCS.parent / "conf" / "loss"

BLOCK = re.compile(r"(<!-- generated: (\w+) .*?-->\n).*?(<!-- end -->)", re.DOTALL)
"""A generated part: its opening line names the function of `PARTS` that writes it."""


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; a bar inside a cell is escaped."""
    cells = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(str(cell).replace("|", r"\|") for cell in row) + " |\n" for row in cells)


def loss_values(name: str) -> dict[str, Any]:
    """conf/loss/<name>.yaml with its defaults, as plain values."""
    with initialize_config_dir(str(LOSSES.parent), version_base="1.3"):
        values = OmegaConf.to_container(compose(f"loss/{name}").loss)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def source(name: str) -> str:
    """What the comment at the head of a YAML file says up to its first full stop or colon."""
    head = re.match(r"(?:#.*\n)+", (LOSSES / f"{name}.yaml").read_text())
    assert head, f"{name}.yaml has no comment at its head"
    text = " ".join(line.removeprefix("#").strip() for line in head[0].splitlines())
    return re.split(r": |\.(?:\s+(?=[A-Z])|$)", text)[0]


def presets() -> str:
    """The files of BAPO itself."""
    rows = []
    for name in sorted(path.stem for path in LOSSES.glob("bapo*.yaml")):
        values = loss_values(name)
        ranges = (":".join(str(values[key][part]) for part in ("start", "stop", "step")) for key in ("clip_low", "clip_high"))
        dual = values["dual_clip"]
        if dual is not None and not values["dual_clip_in_search"]:
            dual = f"{dual}, in the loss only"
        masses = f"{values['mass']} / {values['weight']}"
        target = f"{values['target_positive_ratio']:.4g}"
        rows.append(
            [f"`{name}`", target, *ranges, values["search_order"], masses, "off" if dual is None else dual, source(name)]
        )
    header = ["preset", "target", "clip_low", "clip_high", "order", "mass / weight", "dual clip", "what it is"]
    return table(header, rows)


def others() -> str:
    """The files of every other loss."""
    rows = []
    for name in sorted(path.stem for path in LOSSES.glob("*.yaml") if not path.stem.startswith("bapo")):
        values = loss_values(name)
        target = values.pop("_target_").rpartition(".")[2]
        said = ", ".join(f"{key} {value}" for key, value in values.items() if value is not None)
        rows.append([f"`{name}`", f"`{target}`", said])
    return table(["file of `conf/loss/`", "class", "values"], rows)


def registry() -> str:
    """Every metric of `bapo.metrics`, those with a free part in their name last."""
    entries = [*metrics.METRICS.values(), *(metric for _, metric in metrics._PATTERNS)]
    rows = [[f"`{m.name}`", m.formula, m.unit, m.reduction] for m in entries]
    return table(["name", "formula", "unit", "reduction"], rows)


PARTS: dict[str, Callable[[], str]] = {"presets": presets, "others": others, "registry": registry}


def generated(text: str) -> str:
    """A page with its generated parts made anew."""
    return BLOCK.sub(lambda block: f"{block[1]}\n{PARTS[block[2]]()}\n{block[3]}", text)


def main(arguments: Sequence[str], folder: Path = DOCS) -> int:
    """Exit status: 1 if --check finds a stale page, 2 for an unknown argument, else 0."""
    if set(arguments) - {"--check"}:
        print("usage: python docs/generate.py [--check]", file=sys.stderr)
        return 2
    stale = [page for page in sorted(folder.glob("*.md")) if page.read_text() != generated(page.read_text())]
    for page in stale:
        if arguments:
            print(f"{page} is stale: run python docs/generate.py", file=sys.stderr)
        else:
            page.write_text(generated(page.read_text()))
            print(f"{page} rewritten")
    return 1 if stale and arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
