"""Processes that compare answers: what they are asked, how they end, and what the command and the benchmark print."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import REPOSITORY
from support.verification import boxed, outcomes, workers

from bapo.tasks import pool, verify
from bapo.tasks.verify import Verdict, check_golds, close_workers, verify_answers

ROWS: list[dict[str, Any]] = json.loads((REPOSITORY / "tests" / "data" / "equivalence.json").read_text())
SURD = (r"so \boxed{\frac{\sqrt{2}}{2}}", r"\frac{1}{\sqrt{2}}")
"""A response and its gold, which only a worker finds equal."""
BOMBS = ["9^{9^{9^{9}}}", "(10^{10})!", r"\frac{1}{1+" * 60 + "1" + "}" * 60, "7" * 1_000_000]


@pytest.fixture(scope="module", autouse=True)
def no_worker_is_left() -> Iterator[None]:
    yield
    close_workers()
    assert workers() == []


def test_math_verify_alone_says_what_the_page_says_of_it() -> None:
    import math_verify

    for row in ROWS:
        gold, answer = (math_verify.parse(rf"\boxed{{{row[side]}}}") for side in ("gold", "answer"))
        assert math_verify.verify(gold, answer) == row["math_verify"], row


class Asked:
    """In the place of the workers: notes what it is asked, answers by `reply`."""

    def __init__(self, reply: Any):
        self.reply = reply
        self.questions: list[dict[str, Any]] = []

    def ask_all(self, questions: list[dict[str, Any]]) -> list[dict[str, Any]]:
        self.questions += questions
        return [self.reply(question) for question in questions]


def test_what_is_decided_by_text_starts_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "Worker", None)
    pairs = [("12", "12"), (r"\frac12", "0.5"), ("5", r"5\text{ cm}"), (r"\text{odd}", "even"), ("x+1", "x+1"), ("5", "x=6")]
    assert outcomes(pairs) == ["right", "right", "right", "wrong", "right", "wrong"]
    assert check_golds([gold for gold, _ in pairs if gold != "x+1"]) == {}


def test_equal_pairs_are_graded_once_and_every_place_gets_its_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(lambda question: {"right": question["answer"] == r"\sqrt{8}"})
    monkeypatch.setattr(verify, "shared_pool", lambda: asked)
    pairs = [(r"2\sqrt{2}", r"\sqrt{8}"), (r"2\sqrt{2}", r"\sqrt{9}"), ("3", "3")] * 4
    assert outcomes(pairs) == ["right", "wrong", "right"] * 4
    assert [question["answer"] for question in asked.questions] == [r"\sqrt{8}", r"\sqrt{9}"]


def test_a_run_stops_when_nothing_can_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "shared_pool", lambda: Asked(lambda question: {"raised": "TypeError: broken"}))
    with pytest.raises(RuntimeError, match="no answer can be compared, not even those that are known: TypeError: broken"):
        outcomes([(r"\sqrt{2}", r"\sqrt{8}"), ("3", "3")])
    assert outcomes([("3", "3")]) == ["right"]  # nothing was compared


def test_one_failed_comparison_is_unverified_and_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def reply(question: dict[str, Any]) -> dict[str, Any]:
        known = question["gold"] != "q"
        return {"right": question["answer"] != "x"} if known else {"raised": "TypeError: q"}

    monkeypatch.setattr(verify, "shared_pool", lambda: Asked(reply))
    for pairs in ([("q", "q^2")], [("q", "q^2"), (r"\sqrt{2}", r"\sqrt{8}")]):
        verdicts = verify_answers([boxed(answer) for _, answer in pairs], [gold for gold, _ in pairs])
        assert verdicts[0] == Verdict("unverified", "TypeError: q", "q^2")
        assert [v.outcome for v in verdicts[1:]] == ["right"] * (len(pairs) - 1)


GRADER = """
import sys
from types import SimpleNamespace

sys.modules["math_verify.grader"] = SimpleNamespace(sympy_symbolic_eq=None)

def verify(*args, **options):
"""


@pytest.mark.parametrize(
    "module",
    [
        "raise ImportError('no parser for antlr 4.7')",
        GRADER + "    raise TypeError('of another version')",
        GRADER + "    return False",
        "import os\nos._exit(3)",
    ],
    ids=["import", "raises", "finds nothing equal", "dies"],
)
def test_a_library_that_does_not_work_stops_the_run(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    close_workers()
    (tmp_path / "math_verify.py").write_text(module)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(
        RuntimeError, match=r"answers cannot be verified.*(antlr 4\.7|of another|'right': False|does not start)"
    ):
        verify_answers([SURD[0]], [SURD[1]])
    assert workers() == []
    monkeypatch.undo()
    assert verify_answers([SURD[0]], [SURD[1]])[0].outcome == "right"  # the next call starts anew


def test_bombs_are_unverified_and_change_no_other_label() -> None:
    pairs = [pair for bomb in BOMBS for pair in ((r"\sqrt{2}", bomb), (r"\sqrt{8}", r"2\sqrt{2}"), (r"\sqrt{8}", r"3\sqrt{2}"))]
    begun = time.monotonic()
    verdicts = verify_answers([boxed(answer) for _, answer in pairs], [gold for gold, _ in pairs], timeout_s=4)
    assert time.monotonic() - begun < 60
    assert [v.outcome for v in verdicts] == ["unverified", "right", "wrong"] * len(BOMBS)
    assert [v.reason for v in verdicts[:6:3]] == ["not decided within 4 s"] * 2
    assert verdicts[9].reason == "the answer has 1000000 characters; 1000 is the most"


def test_memory_is_limited_for_each_answer() -> None:
    pairs = [(r"\sqrt{2}", "3^{40000000}")]
    (verdict,) = verify_answers([boxed(pairs[0][1])], [pairs[0][0]], memory_mb=2, timeout_s=30)
    assert (verdict.outcome, verdict.reason) == ("unverified", "out of memory")
    assert outcomes([(r"\sqrt{2}", "3^{400000}")], timeout_s=30) == ["wrong"]


def test_several_threads_ask_at_a_time() -> None:
    found: dict[int, list[str]] = {}

    def ask(n: int) -> None:
        found[n] = outcomes([(rf"{k}\sqrt{{{n}}}", rf"\sqrt{{{n * k * k + k % 2}}}") for k in range(2, 8)], timeout_s=60)

    threads = [threading.Thread(target=ask, args=(n,)) for n in (3, 5, 6, 7, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: ["right", "wrong"] * 3 for n in (3, 5, 6, 7, 10)}
    assert 1 <= len(workers()) <= pool.MAX_WORKERS


def test_a_worker_that_was_killed_is_replaced() -> None:
    assert verify_answers([SURD[0]], [SURD[1]])[0].outcome == "right"
    for process in (before := workers()):
        process.kill()
        process.wait()
    assert verify_answers([SURD[0]], [SURD[1]])[0].outcome == "right"
    assert workers()
    assert not {p.pid for p in workers()} & {p.pid for p in before}


def test_closing_ends_what_is_under_way() -> None:
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            outcomes([(r"\sqrt{2}", BOMBS[0])], timeout_s=60)
        except RuntimeError as error:
            failed.append(error)

    assert verify_answers([SURD[0]], [SURD[1]])[0].outcome == "right"
    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(1)
    close_workers()
    thread.join(10)
    assert not thread.is_alive()
    assert [str(error) for error in failed] == ["the workers were closed while they verified answers"]
    assert workers() == []


def start(program: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A Python that has run `program`, whose first line is the ids of its workers."""
    head = """
        import os, sys, threading, time, psutil
        from bapo.tasks.verify import verify_answers
        def ids():
            return [p.pid for p in psutil.Process().children() if "bapo.tasks.worker" in p.cmdline()]
        def surd(n):
            return verify_answers([r"\\boxed{\\sqrt{%d}}" % (2 * n * n)], [r"%d\\sqrt{2}" % n])[0].outcome
        assert surd(3) == "right"
    """
    code = textwrap.dedent(head) + textwrap.dedent(program)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, [int(word) for word in process.stdout.readline().split()]


def all_gone(pids: list[int], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while left := [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]:
        if time.monotonic() > deadline:
            return not left
        time.sleep(0.05)
    return True


@pytest.mark.slow
@pytest.mark.parametrize("busy", [False, True])
def test_no_worker_outlives_the_end_of_the_interpreter(busy: bool) -> None:
    bomb = f'verify_answers([r"\\boxed{{{BOMBS[0]}}}"], [r"\\sqrt{{2}}"], timeout_s=60)'
    ask = f"threading.Thread(target=lambda: {bomb}, daemon=True).start()\ntime.sleep(1)\n" if busy else ""
    process, pids = start(f"{ask}print(*ids(), flush=True)")
    assert process.wait(30) == 0
    assert pids
    assert all_gone(pids, 5)


@pytest.mark.slow
@pytest.mark.parametrize("busy", [False, True])
def test_no_worker_outlives_kill_9(busy: bool) -> None:
    bomb = f'verify_answers([r"\\boxed{{{BOMBS[0]}}}"], [r"\\sqrt{{2}}"], timeout_s=3)'
    process, pids = start(f"print(*ids(), flush=True)\n{bomb if busy else 'time.sleep(600)'}\ntime.sleep(600)")
    assert pids
    time.sleep(1.0)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert all_gone(pids, 3 + 1 + 5 if busy else 5)  # a busy one ends when its answer's time is over


@pytest.mark.slow
def test_no_worker_outlives_kill_9_while_a_fork_lives() -> None:
    process, pids = start("""
        from bapo.tasks import pool
        held = pool.shared_pool()  # the fork keeps the connections open
        if (child := os.fork()) == 0:
            os.close(1)
            time.sleep(600)
            os._exit(0)
        print(*ids(), child, flush=True)
        time.sleep(600)
    """)
    *pids, child = pids
    assert pids
    process.send_signal(signal.SIGKILL)
    process.wait()
    try:
        assert all_gone(pids, 10)
        assert psutil.pid_exists(child)
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.slow
def test_a_fork_has_workers_of_its_own() -> None:
    process, pids = start("""
        from bapo.tasks import pool
        before = ids()
        if (child := os.fork()) == 0:
            held = pool._pools
            os._exit(0 if not held and surd(5) == "right" and ids() and not set(ids()) & set(before) else 1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert surd(7) == "right" and ids() == before
        print(status, flush=True)
    """)
    assert process.wait(60) == 0
    assert pids == [0]


def test_the_command_shows_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert verify.main([r"so \boxed{0.5}", r"\frac{1}{2}"]) == 0
    assert verify.main([r"so \boxed{25.0}", "025", "--mode", "integer"]) == 0
    assert verify.main(["so 5", "5"]) == 0
    assert verify.main([r"\boxed{1,-2}", "-2,1"]) == 0  # a gold that begins with a minus is no option
    assert verify.main([r"-\boxed{-0.5}", r"-\frac{1}{2}", "--mode=math"]) == 0
    assert verify.main(["--mode", "integer", "--answer-in", "hashes", "--", "so #### 7", "007"]) == 0
    assert verify.main([r"\boxed{\sqrt{2}}", r"\sqrt{"]) == 2
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "right (1): the same answer; answer 0.5",
        "wrong (0): not a whole number from 0 to 999, in digits; answer 25.0",
        r"no_answer (0): there is no complete \boxed{...}",
        "right (1): the same answer; answer 1,-2",
        "right (1): the same answer; answer -0.5",
        "right (1): the same answer; answer 7",
    ]
    assert err == "error: the gold '\\\\sqrt{' does not parse\n"


def test_the_benchmark_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    import verification

    seconds = verification.main(easy=50, formulas=28, timeout_s=0.5)
    assert len(seconds) == 4
    assert all(value > 0 for value in seconds.values())
    assert "8 bombs among formulas, 0.5 s each | 64 |" in capsys.readouterr().out
