"""Scored responses of an evaluation, by hand."""

from __future__ import annotations

from bapo.evaluation.scoring import Scored


def scored(uid: str, index: int, answer: str | None, reward: float, length: int = 2, **more) -> Scored:
    facts = {"seed": 0, "verified": True, "finish_reason": "stop", "response": ""} | more
    return Scored(uid, index, answer=answer, reward=reward, length=length, prompt="", gold="", **facts)
