"""Cost of grading answers: `python benchmarks/verification.py` prints a table; docs/verification.md quotes it."""

from __future__ import annotations

import os
import time

from bapo.tasks.verify import close_workers, verify_answers

BOMBS = (
    "9^{9^{9^{9}}}", "(10^{10})!", r"\binom{10^9}{5\cdot 10^8}", "2^{2^{40}}", r"\prod_{k=1}^{10^9} k", "(a+b+c+d+e+f+g)^{60}",
    r"\frac{1}{1+" * 60 + "1" + "}" * 60, "7" * 1_000_000,
)  # fmt: skip


def main(easy: int = 20_000, formulas: int = 400, timeout_s: float = 5.0) -> dict[str, float]:
    """Seconds of each batch, after it is printed. No answer is there twice, since equal pairs are graded once."""
    numbers = [(f"{n}", rf"so it is \boxed{{{n + n % 2}.0}}") for n in range(easy)]
    surds = [(rf"{n}\sqrt{{2}}", rf"\boxed{{\sqrt{{{2 * n * n}}}}}") for n in range(2, 2 * formulas + 2)]
    bombs = [(r"\sqrt{2}", rf"\boxed{{{bomb}}}") for bomb in BOMBS]
    mixed = [pair for i, bomb in enumerate(bombs) for pair in (bomb, *surds[7 * i : 7 * i + 7])]
    seconds: dict[str, float] = {}
    print(f"{os.cpu_count()} cores\n\n| batch | answers | seconds | answers/s |\n|---|---|---|---|")
    for name, pairs in (
        ("numbers", numbers),
        ("formulas, workers not started", surds[:formulas]),
        ("formulas, workers started", surds[formulas:]),
        (f"{len(BOMBS)} bombs among formulas, {timeout_s:g} s each", mixed),
    ):
        begun = time.perf_counter()
        verdicts = verify_answers([response for _, response in pairs], [gold for gold, _ in pairs], timeout_s=timeout_s)
        seconds[name] = time.perf_counter() - begun
        assert all(v.outcome in ("right", "wrong") for v, pair in zip(verdicts, pairs, strict=True) if pair not in bombs)
        assert all(v.outcome == "unverified" for v, pair in zip(verdicts, pairs, strict=True) if pair in bombs)
        print(f"| {name} | {len(pairs)} | {seconds[name]:.2f} | {len(pairs) / seconds[name]:,.0f} |")
    close_workers()
    return seconds


if __name__ == "__main__":
    main()
