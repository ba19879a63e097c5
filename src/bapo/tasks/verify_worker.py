r"""A process that compares answers for `bapo.tasks.verify_pool`, and can be killed.

python -m bapo.tasks.verify_worker FD PARENT: questions come over the connection FD and replies go back, as JSON. It ends when
the connection does, or the process PARENT; the system ends it when a question has taken longer than it may.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bapo.tasks.equivalence import formula, same_answer

GRACE_S = 1.0
"""After its time a question has this long to be stopped by the one who asked."""
KNOWN_PAIRS = ((r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}", True), ("(x+1)^2", "x^2+2x+1", True), ("x, y", "x", False))
"""What anything that compares formulas has to know: numbers, expressions, sets."""


def load() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The answering function, tried out: with a parser of another version the libraries would find nothing equal."""
    from bapo.tasks import formulas  # half a second, and the point where a broken installation shows

    def parse_gold(gold: str) -> bool:
        if (text := formula(gold)) is not None:
            formulas.equal(text, text)  # some parse, and then nothing can be compared with them
        return True

    def reply(question: dict[str, Any]) -> dict[str, Any]:
        try:
            if question["answer"] is None:
                return {"right": parse_gold(question["gold"])}
            return {"right": same_answer(question["gold"], question["answer"], formulas.equal)}
        except formulas.NotParsedError as error:
            return {"not_parsed": error.side}
        except RecursionError:
            return {"gave_up": "nested too deeply"}
        except MemoryError:
            return {"gave_up": "out of memory", "last": True}
        except Exception as error:
            return {"raised": " ".join(f"{type(error).__name__}: {error}".split())[:300]}

    for gold, answer, right in KNOWN_PAIRS:
        if (got := reply({"gold": gold, "answer": answer})) != {"right": right}:
            raise RuntimeError(f"of {gold} and {answer} it says {got}")
    return reply


def limit_memory(megabytes: float | None) -> None:
    """Beyond what the process has now; None for no limit. Where the system cannot tell, there is none."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    soft = hard
    statm = Path("/proc/self/statm")
    if megabytes is not None and statm.exists():
        soft = int(statm.read_text().split()[0]) * resource.getpagesize() + int(megabytes * 2**20)
        soft = soft if hard == resource.RLIM_INFINITY else min(soft, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def main(
    connection: Connection,
    parent: int,
    load: Callable[[], Callable[[dict[str, Any]], dict[str, Any]]] = load,
    library: str = "math-verify",
) -> None:
    """Answers with what `load` gives, which needs `library`, until there is nobody left to ask."""
    logging.disable()
    try:
        reply = load()
    except Exception as error:
        connection.send_bytes(json.dumps({"broken": f"{library} does not work here: {type(error).__name__}: {error}"}).encode())
        return
    connection.send_bytes(b"{}")
    while os.getppid() == parent:  # a fork of the parent may hold the connection open
        if not connection.poll(1.0):
            continue
        question = json.loads(connection.recv_bytes())
        signal.setitimer(signal.ITIMER_REAL, question["timeout_s"] + GRACE_S)  # unhandled, so that it ends what Python cannot
        limit_memory(question["memory_mb"])
        answer = reply(question)
        limit_memory(None)
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send_bytes(json.dumps(answer).encode())


if __name__ == "__main__":
    try:
        main(Connection(int(sys.argv[1])), int(sys.argv[2]))
    except (EOFError, OSError):
        sys.exit()
