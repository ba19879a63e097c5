r"""Judges the answers of responses: `verify_answers(responses, golds)`, from any thread. Other processes compare formulas.

An answer is what stands in the last complete `\boxed{...}` of a response. docs/verification.md says what is the same answer.
`python -m bapo.tasks.verify RESPONSE GOLD [--mode math]` shows a verdict.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, get_args

from bapo.tasks.answers import READERS, AnswerIn, plain, small_integer
from bapo.tasks.equivalence import MAX_CHARACTERS, formula, same_answer, tidy
from bapo.tasks.verify_pool import close_workers, shared_pool
from bapo.tasks.verify_worker import KNOWN_PAIRS

__all__ = ["Mode", "Verdict", "check_gold", "check_golds", "close_workers", "verify_answers"]

Mode = Literal["math", "exact", "integer"]
Outcome = Literal["right", "wrong", "no_answer", "unverified"]
TIMEOUT_S = 5.0
MEMORY_MB = 512.0
NONE_THERE = {"box": r"no complete \boxed{...}", "hashes": "no ####"}


@dataclass(frozen=True)
class Verdict:
    """unverified: nobody knows, it took too long or too much memory, or the comparison failed. answer: the text of the box."""

    outcome: Outcome
    reason: str
    answer: str | None = None

    @property
    def reward(self) -> float:
        """1.0 for right, else 0.0."""
        return float(self.outcome == "right")


def verify_answers(
    responses: Sequence[str],
    golds: Sequence[str],
    mode: Mode = "math",
    timeout_s: float = TIMEOUT_S,
    memory_mb: float = MEMORY_MB,
    answer_in: AnswerIn = "box",
) -> list[Verdict]:
    """A verdict for each response against the gold at its place; `timeout_s` and `memory_mb` are the limits of one answer.

    answer_in: where a response has its answer, in its last box or after its last `####`.

    Raises ValueError for a gold that nothing can be compared with (`check_gold` finds it when a task is loaded), RuntimeError
    if the library that compares formulas does not work.
    """
    _check(mode, timeout_s, memory_mb)
    if len(responses) != len(golds):
        raise ValueError(f"there are {len(responses)} responses and {len(golds)} golds; there must be as many")
    pairs = [(gold, READERS[answer_in](response)) for gold, response in zip(golds, responses, strict=True)]
    decided = {
        pair: _judge_here(*pair, mode, answer_in) for pair in dict.fromkeys(pairs)
    }  # a group often gives one answer many times
    limits = {"timeout_s": timeout_s, "memory_mb": memory_mb}
    asked = [pair for pair, verdict in decided.items() if verdict is None]
    questions = [{"gold": gold, "answer": answer, **limits} for gold, answer in asked]
    replies = shared_pool().ask_all(questions)
    if replies and all("raised" in reply for reply in replies):
        known = [{"gold": gold, "answer": answer, **limits} for gold, answer, _ in KNOWN_PAIRS]
        if shared_pool().ask_all(known) != [{"right": right} for *_, right in KNOWN_PAIRS]:
            raise RuntimeError(f"no answer can be compared, not even those that are known: {replies[0]['raised']}")
    verdicts = {pair: verdict for pair, verdict in decided.items() if verdict is not None}
    verdicts |= {pair: _verdict(*pair, reply) for pair, reply in zip(asked, replies, strict=True)}
    return [verdicts[pair] for pair in pairs]


def check_gold(gold: str, mode: Mode = "math", timeout_s: float = TIMEOUT_S, memory_mb: float = MEMORY_MB) -> None:
    """Raises ValueError for a gold that no answer could be compared with; tasks call it when they are loaded."""
    for reason in check_golds([gold], mode, timeout_s, memory_mb).values():
        raise ValueError(f"the gold {_shown(gold)} {reason}")


def check_golds(
    golds: Sequence[str], mode: Mode = "math", timeout_s: float = TIMEOUT_S, memory_mb: float = MEMORY_MB
) -> dict[int, str]:
    """`check_gold` for many at a time: what is wrong with which of `golds`, by its index. Empty if nothing is."""
    _check(mode, timeout_s, memory_mb)
    faults = {index: fault for index, gold in enumerate(golds) if (fault := _fault(gold, mode))}
    asked = [index for index, gold in enumerate(golds) if mode == "math" and index not in faults and formula(gold) is not None]
    questions = [{"gold": golds[i], "answer": None, "timeout_s": timeout_s, "memory_mb": memory_mb} for i in asked]
    for index, reply in zip(asked, shared_pool().ask_all(questions), strict=True):
        if "right" not in reply:
            reason = reply.get("gave_up") or reply.get("raised")
            told = f"cannot be compared: {reason}" if "raised" in reply else f"does not parse: {reason}"
            faults[index] = "does not parse" if "not_parsed" in reply else told
    return dict(sorted(faults.items()))


def _check(mode: str, timeout_s: float, memory_mb: float) -> None:
    if mode not in get_args(Mode):
        raise ValueError(f"mode is {mode!r}; it must be one of {', '.join(get_args(Mode))}")
    for name, value in (("timeout_s", timeout_s), ("memory_mb", memory_mb)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name} is {value}; it must be > 0 and finite")


def _fault(gold: str, mode: Mode) -> str | None:
    """Why a gold is none, as far as that can be told without a parser."""
    if len(gold) > MAX_CHARACTERS:
        return f"has {len(gold)} characters; {MAX_CHARACTERS} is the most"
    if mode == "integer":
        return None if small_integer(gold) is not None else "is not a whole number from 0 to 999"
    return None if (tidy(gold) if mode == "math" else plain(gold)) else "is empty"


def _judge_here(gold: str, answer: str | None, mode: Mode, answer_in: AnswerIn) -> Verdict | None:
    """The verdict, if text, numbers and the rules decide it; None where formulas have to be compared."""
    if fault := _fault(gold, mode):
        raise ValueError(f"the gold {_shown(gold)} {fault}")
    if answer is None:
        return Verdict("no_answer", f"there is {NONE_THERE[answer_in]}")
    if len(answer) > MAX_CHARACTERS:
        return Verdict("unverified", f"the answer has {len(answer)} characters; {MAX_CHARACTERS} is the most", answer)
    if not (tidy(answer) if mode == "math" else plain(answer)):
        return Verdict("no_answer", "the box is empty" if answer_in == "box" else "nothing stands after the last ####", answer)
    if mode == "integer":
        if (said := small_integer(answer)) is None:
            return Verdict("wrong", "not a whole number from 0 to 999, in digits", answer)
        return _compared(said == small_integer(gold), answer)
    if mode == "exact":
        return _compared(plain(answer) == plain(gold), answer)
    try:
        return _compared(same_answer(gold, answer, _ask_a_worker), answer)
    except _NeedsWorkerError:
        return None


class _NeedsWorkerError(Exception):
    """Two formulas have to be compared."""


def _ask_a_worker(gold: str, answer: str) -> bool:
    raise _NeedsWorkerError


def _compared(right: bool, answer: str | None) -> Verdict:
    return Verdict("right", "the same answer", answer) if right else Verdict("wrong", "another answer", answer)


def _verdict(gold: str, answer: str | None, reply: dict[str, Any]) -> Verdict:
    if "right" in reply:
        return _compared(reply["right"], answer)
    if reply.get("not_parsed") == "gold":
        raise ValueError(f"the gold {_shown(gold)} does not parse")
    if "not_parsed" in reply:
        return Verdict("wrong", "the answer does not parse", answer)
    return Verdict("unverified", reply.get("gave_up") or reply["raised"], answer)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:60] + "...")


def _options_first(arguments: Sequence[str]) -> list[str]:
    """The rest behind `--`, since an answer may begin with a minus, which is no option."""
    options, rest = [], []
    left = iter(arguments)
    for argument in left:
        if argument in ("-h", "--help") or re.match(r"--(mode|answer-in)=", argument):
            options.append(argument)
        elif argument in ("--mode", "--answer-in"):
            options += [argument, *islice(left, 1)]
        else:
            rest.append(argument)
    return [*options, *([] if "--" in rest else ["--"]), *rest]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bapo.tasks.verify", description="Judge the last box of a response.")
    parser.add_argument("response", help=r"text with an answer in \boxed{...}")
    parser.add_argument("gold", help="the right answer, without a box")
    parser.add_argument("--mode", choices=get_args(Mode), default="math")
    parser.add_argument("--answer-in", choices=get_args(AnswerIn), default="box")
    given = parser.parse_args(_options_first(sys.argv[1:] if arguments is None else arguments))
    try:
        (verdict,) = verify_answers([given.response], [given.gold], given.mode, answer_in=given.answer_in)
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(
        f"{verdict.outcome} ({verdict.reward:g}): {verdict.reason}" + (f"; answer {verdict.answer}" if verdict.answer else "")
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
