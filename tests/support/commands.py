"""Commands of a page of documentation, and sweeps cut to two jobs."""

from __future__ import annotations

import re
import shlex

from support.configs import composed


def commands(text: str) -> list[str]:
    """Every line of a shell block, and inline code that begins like a command; placeholders as they stand, no comments."""
    blocks = re.findall(r"^```(?:bash|console|sh|shell)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    inline = re.findall(r"`((?:\.venv/bin/|python3? |make |pip )[^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    found = (shlex.split(line, comments=True) for line in [*lines, *inline])
    return list(dict.fromkeys(shlex.join(words) for words in found if words))


def two_jobs(overrides: list[str]) -> tuple[list[str], list[str]]:
    """A sweep cut to the first two values of its first range and one value of the others; and its first job alone."""
    sweep, job = [], []
    for override in overrides:
        key, _, value = override.partition("=")
        if key == "+sweep":
            params = composed(override).hydra.sweeper.params
            sweep.append(override)
            job.append(override)
            more_sweep, more_job = two_jobs([f"{name}={values}" for name, values in params.items()])
            sweep, job = sweep + more_sweep, job + more_job
            continue
        values = [value] if value[:1] in "[{'\"" else value.split(",")
        taken = 1 if any("," in s for s in sweep) else 2
        sweep.append(f"{key}={','.join(values[:taken])}")
        job.append(f"{key}={values[0]}")
    return sweep, job
