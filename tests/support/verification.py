"""Answers in boxes, their outcomes, and the worker processes that compare them."""

from __future__ import annotations

from typing import Any

import psutil

from bapo.tasks.verify import verify_answers


def boxed(answer: str) -> str:
    return rf"I get \boxed{{{answer}}}"


def outcomes(pairs: list[tuple[str, str]], **options: Any) -> list[str]:
    """Of pairs (gold, answer)."""
    return [v.outcome for v in verify_answers([boxed(a) for _, a in pairs], [g for g, _ in pairs], **options)]


def workers() -> list[psutil.Process]:
    """Those that this process has started, and that are alive."""
    found = [p for p in psutil.Process().children() if "bapo.tasks.worker" in p.cmdline()]
    return [p for p in found if p.status() != psutil.STATUS_ZOMBIE]
