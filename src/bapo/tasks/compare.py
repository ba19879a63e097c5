"""Comparison of two formulas, for a worker process (`bapo.tasks.worker`)."""

from __future__ import annotations

from typing import Any

from bapo.tasks.equivalence import formula, same_answer
from bapo.tasks.worker import Reply, shorten

OTHER_ANSWERS = ("1", "x=1")
"""What a gold is compared with when it is checked: a value and an equation take different ways."""
KNOWN_PAIRS = ((r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}", True), ("(x+1)^2", "x^2+2x+1", True), ("x, y", "x", False))
"""Numbers, expressions and sets that every working installation can compare."""


def load() -> Reply:
    """The function that compares, tested first: with a parser of another version the libraries find nothing equal."""
    from bapo.tasks import formulas  # half a second, and the point where a broken installation shows

    def parses(gold: str) -> bool:
        """True for a gold that equals itself and that some other answer can be compared with; else raises as `equal` does."""
        if (text := formula(gold)) is not None:
            formulas.equal(text, text)  # some parse, and then nothing can be compared with them
        faults = []
        for answer in OTHER_ANSWERS:
            try:
                same_answer(gold, answer, formulas.equal)
            except formulas.NotParsedError as error:
                faults += [error] if error.side == "gold" else []
        if len(faults) == len(OTHER_ANSWERS):
            raise faults[0]
        return True

    def reply(question: dict[str, Any]) -> dict[str, Any]:
        try:
            if question["answer"] is None:
                return {"right": parses(question["gold"])}
            return {"right": same_answer(question["gold"], question["answer"], formulas.equal)}
        except formulas.NotParsedError as error:
            return {"not_parsed": error.side}
        except RecursionError:
            return {"gave_up": "nested too deeply"}
        except MemoryError:
            return {"gave_up": "out of memory", "last": True}
        except Exception as error:
            return {"raised": shorten(error)}

    for gold, answer, right in KNOWN_PAIRS:
        if (got := reply({"gold": gold, "answer": answer})) != {"right": right}:
            raise RuntimeError(f"of {gold} and {answer} it says {got}")
    return reply
