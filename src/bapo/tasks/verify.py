r"""Grades the answers of responses: `verify_answers(responses, golds)`, from any thread. Other processes compare formulas.

An answer is the content of the last complete `\boxed{...}` of a response. docs/verification.md says which answers are the same.
`python -m bapo.tasks.verify RESPONSE GOLD [--mode math]` shows a verdict.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, cast, get_args

from bapo.tasks.answers import READERS, AnswerIn, number, plain, small_integer, spell
from bapo.tasks.compare import KNOWN_PAIRS
from bapo.tasks.equivalence import MAX_CHARACTERS, canonical, formula, same_answer
from bapo.tasks.pool import close_workers, shared_pool
from bapo.tasks.spelling import tidy

__all__ = ["Mode", "Verdict", "check_golds", "close_workers", "verify_answers", "vote"]

Mode = Literal["math", "exact", "integer", "number"]
Outcome = Literal["right", "wrong", "no_answer", "unverified"]
TIMEOUT_S = 5.0
MEMORY_MB = 512.0


@dataclass(frozen=True)
class Verdict:
    """answer: the text of the box. unverified: the comparison failed, or took too much time or memory."""

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

    Raises ValueError for a gold that is empty, too long or no number where the mode wants one (when a task is loaded,
    `check_golds` finds it, and those that do not parse), RuntimeError if the library that compares formulas does not work.
    """
    limits = _limits(mode, timeout_s, memory_mb)
    if len(responses) != len(golds):
        raise ValueError(f"there are {len(responses)} responses and {len(golds)} golds; there must be as many")
    pairs = [(gold, READERS[answer_in](response)) for gold, response in zip(golds, responses, strict=True)]
    verdicts = {pair: _grade(*pair, mode, answer_in) for pair in dict.fromkeys(pairs)}  # a group often repeats an answer
    formulas = [pair for pair, verdict in verdicts.items() if verdict is None]
    replies = shared_pool().ask_all([{"gold": gold, "answer": answer, **limits} for gold, answer in formulas])
    if replies and all("raised" in reply for reply in replies):
        known = [{"gold": gold, "answer": answer, **limits} for gold, answer, _ in KNOWN_PAIRS]
        if shared_pool().ask_all(known) != [{"right": right} for *_, right in KNOWN_PAIRS]:
            raise RuntimeError(f"no answer can be compared, not even those that are known: {replies[0]['raised']}")
    verdicts |= {pair: _verdict(*pair, reply) for pair, reply in zip(formulas, replies, strict=True)}
    return [cast(Verdict, verdicts[pair]) for pair in pairs]


def check_golds(
    golds: Iterable[str], mode: Mode = "math", timeout_s: float = TIMEOUT_S, memory_mb: float = MEMORY_MB
) -> dict[str, str]:
    """The golds that no answer could be compared with, and the reason."""
    limits = _limits(mode, timeout_s, memory_mb)
    distinct = list(dict.fromkeys(golds))
    faults = {gold: fault for gold in distinct if (fault := _fault(gold, mode))}
    formulas = [gold for gold in distinct if mode == "math" and gold not in faults and formula(gold) is not None]
    replies = shared_pool().ask_all([{"gold": gold, "answer": None, **limits} for gold in formulas])
    for gold, reply in zip(formulas, replies, strict=True):
        if "raised" in reply:
            faults[gold] = f"cannot be compared: {reply['raised']}"
        elif "right" not in reply:
            faults[gold] = "does not parse" + (f": {reply['gave_up']}" if "gave_up" in reply else "")
    return faults


def vote(response: str, mode: Mode = "math", answer_in: AnswerIn = "box") -> str | None:
    """The answer of a response in one spelling, without comparing formulas: `0.50` is 1/2, but `x+1` is not `1+x`."""
    answer = READERS[answer_in](response)
    if answer is None:
        return None
    if mode == "number":
        return None if (value := number(answer)) is None else spell(value)
    if len(answer) > MAX_CHARACTERS:
        return None
    if mode == "integer":
        return None if (whole := small_integer(answer)) is None else str(whole)
    return canonical(answer) if mode == "math" else plain(answer) or None


def _limits(mode: str, timeout_s: float, memory_mb: float) -> dict[str, float]:
    if mode not in get_args(Mode):
        raise ValueError(f"mode is {mode!r}; it must be one of {', '.join(get_args(Mode))}")
    limits = {"timeout_s": timeout_s, "memory_mb": memory_mb}
    for name, value in limits.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} is {value}; it must be > 0 and finite")
    return limits


def _fault(gold: str, mode: Mode) -> str | None:
    """The reason why no answer can be compared with `gold`, as far as that shows without a parser."""
    if len(gold) > MAX_CHARACTERS:
        return f"is longer than {MAX_CHARACTERS} characters"
    if mode == "integer":
        return None if small_integer(gold) is not None else "is not a whole number from 0 to 999"
    if mode == "number":
        return None if number(gold) is not None else "is not a number"
    return None if (tidy(gold) if mode == "math" else plain(gold)) else "is empty"


def _grade(gold: str, answer: str | None, mode: Mode, answer_in: AnswerIn) -> Verdict | None:
    """The verdict, if text, numbers and the rules decide it; None where formulas have to be compared."""
    if fault := _fault(gold, mode):
        raise ValueError(f"the gold {_short(gold)} {fault}")
    if answer is None:
        return Verdict("no_answer", "there is no " + (r"complete \boxed{...}" if answer_in == "box" else "####"))
    if mode == "number":
        return _compared(number(answer) == number(gold), answer)
    if len(answer) > MAX_CHARACTERS:
        return Verdict("unverified", f"the answer has {len(answer)} characters; {MAX_CHARACTERS} is the most", answer)
    if not (tidy(answer) if mode == "math" else plain(answer)):
        return Verdict("no_answer", "the box is empty" if answer_in == "box" else "nothing stands after the last ####", answer)
    if mode == "integer":
        if (value := small_integer(answer)) is None:
            return Verdict("wrong", "not a whole number from 0 to 999, in digits", answer)
        return _compared(value == small_integer(gold), answer)
    if mode == "exact":
        return _compared(plain(answer) == plain(gold), answer)
    try:
        return _compared(same_answer(gold, answer, _leave_to_worker), answer)
    except _FormulasError:
        return None


class _FormulasError(Exception):
    """Two formulas have to be compared."""


def _leave_to_worker(gold: str, answer: str) -> bool:
    raise _FormulasError


def _compared(right: bool, answer: str | None) -> Verdict:
    return Verdict("right", "the same answer", answer) if right else Verdict("wrong", "another answer", answer)


def _verdict(gold: str, answer: str | None, reply: dict[str, Any]) -> Verdict:
    if "right" in reply:
        return _compared(reply["right"], answer)
    if reply.get("not_parsed") == "gold":  # beside this answer: `check_golds` has compared it with others
        return Verdict("unverified", f"the gold {_short(gold)} cannot be compared with it", answer)
    if "not_parsed" in reply:
        return Verdict("wrong", "the answer does not parse", answer)
    return Verdict("unverified", reply.get("gave_up") or reply["raised"], answer)


def _short(text: str) -> str:
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
    parser = argparse.ArgumentParser(prog="python -m bapo.tasks.verify", description="Grade the answer of a response.")
    parser.add_argument("response", help=r"text with an answer in \boxed{...}")
    parser.add_argument("gold", help="the right answer, without a box")
    parser.add_argument("--mode", choices=get_args(Mode), default="math")
    parser.add_argument("--answer-in", choices=get_args(AnswerIn), default="box")
    options = parser.parse_args(_options_first(sys.argv[1:] if arguments is None else arguments))
    try:
        if faults := check_golds([options.gold], options.mode):
            raise ValueError(f"the gold {_short(options.gold)} {faults[options.gold]}")
        (verdict,) = verify_answers([options.response], [options.gold], options.mode, answer_in=options.answer_in)
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    answer = f"; answer {verdict.answer}" if verdict.answer else ""
    print(f"{verdict.outcome} ({verdict.reward:g}): {verdict.reason}{answer}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
