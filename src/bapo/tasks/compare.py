"""Comparison of two formulas, for a worker process (`bapo.tasks.worker`)."""

from __future__ import annotations

from typing import Any

from bapo.tasks.equivalence import formula, same_answer
from bapo.tasks.worker import Reply, shorten

KNOWN_PAIRS = ((r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}", True), ("(x+1)^2", "x^2+2x+1", True), ("x, y", "x", False))
"""Numbers, expressions and sets that every working installation can compare."""


def load() -> Reply:
    """The function that compares, tested first: with a parser of another version the libraries find nothing equal."""
    from bapo.tasks import formulas  # half a second, and the point where a broken installation shows

    def parses(gold: str) -> bool:
        if (text := formula(gold)) is not None:
            formulas.equal(text, text)  # some parse, and then nothing can be compared with them
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
