"""Verification of answers: which text is the answer, which answers are the same, and processes that end in time."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support import REPOSITORY
from support.verification import boxed, outcomes, workers

from bapo.tasks import verify
from bapo.tasks.answers import after_hashes, last_box
from bapo.tasks.spelling import rational, tidy
from bapo.tasks.units import split_unit
from bapo.tasks.verify import Verdict, check_golds, close_workers, verify_answers

ROWS: list[dict[str, Any]] = json.loads((REPOSITORY / "tests" / "data" / "equivalence.json").read_text())


@pytest.fixture(scope="module", autouse=True)
def no_worker_is_left() -> Iterator[None]:
    yield
    close_workers()
    assert workers() == []


# Which text is the answer.


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\text{x}_{\{1\}}}", r"\text{x}_{\{1\}}"),
        (r"\boxed{\{ 1, 2 )} or so", r"\{ 1, 2 )"),  # an escaped brace opens nothing
        (r"\boxed{\begin{pmatrix}1\\{2}\end{pmatrix}}", r"\begin{pmatrix}1\\{2}\end{pmatrix}"),  # here it is a line break
        (r"\boxed{12}. Hmm, no: \boxed{11}.", "11"),
        (r"\boxed{11} is wrong, it is \boxed{12", "11"),
        (r"\boxed{\boxed{5}}", None),
        (r"\boxed{4} \boxed{x = \boxed{5}}", None),
        (r"\boxed{x = \boxed{5}", "5"),
        (r"\boxed{5 and \boxed{6}", "6"),
        (r"\fbox{7}", "7"),
        (r"\boxed {8}", "8"),
        (r"} } \boxed{9} {", "9"),
        (r"\boxed{}", ""),
        (r"\boxed{42", None),
        (r"\boxed 42", None),
        (r"\notboxed{42}", None),
        ("the answer could be 1, 2, 3, 4 or 5", None),
        ("", None),
    ],
)
def test_the_answer_is_what_the_last_complete_box_holds(text: str, answer: str | None) -> None:
    assert last_box(text) == answer


def test_a_long_response_is_read_in_one_pass() -> None:
    begun = time.process_time()
    for part in (r"\boxed{", r"\boxed{1}", "\\", "{", "}", r"\{", r"\boxed "):
        last_box(part * (1_000_000 // len(part)))
    assert time.process_time() - begun < 10


@pytest.mark.parametrize("mode", ["math", "exact", "integer"])
def test_without_a_complete_box_there_is_no_answer(mode: verify.Mode) -> None:
    responses = ["the answer could be 1, 2, 3, 4 or 5", r"\boxed{3", r"\boxed{}", r"\boxed{ $ $ }", "", "3"]
    verdicts = verify_answers(responses, ["3"] * 6, mode)
    assert [(v.outcome, v.reward) for v in verdicts] == [("no_answer", 0.0)] * 6


def test_a_corrected_answer_counts_alone() -> None:
    responses = [r"\boxed{12}. Hmm... \boxed{11}.", r"\boxed{11}. Hmm... \boxed{12}."]
    right, wrong = verify_answers(responses, ["11", "11"])
    assert right == Verdict("right", "the same answer", "11")
    assert wrong == Verdict("wrong", "another answer", "12")
    assert (right.reward, wrong.reward) == (1.0, 0.0)


# Which answers are the same.


@pytest.fixture(scope="module")
def row_verdicts(no_worker_is_left: None) -> list[Verdict]:
    return verify_answers([boxed(row["answer"]) for row in ROWS], [row["gold"] for row in ROWS])


@pytest.mark.parametrize("index", range(len(ROWS)), ids=[f"{r['gold']} | {r['answer']}" for r in ROWS])
def test_every_row_of_the_policy(index: int, row_verdicts: list[Verdict]) -> None:
    row, verdict = ROWS[index], row_verdicts[index]
    assert verdict.outcome == ("right" if row["same"] else "wrong"), row["why"]


def test_every_gold_of_the_policy_parses() -> None:
    assert check_golds([row["gold"] for row in ROWS]) == {}
    assert len({(row["gold"], row["answer"]) for row in ROWS}) == len(ROWS) >= 30


def test_an_answer_is_always_its_own_gold() -> None:
    assert set(outcomes([(text, text + " ") for row in ROWS for text in (row["gold"], row["answer"])])) == {"right"}


def test_gold_and_answer_are_not_to_be_swapped() -> None:
    no_golds = check_golds([row["answer"] for row in ROWS])
    rows = [row for row in ROWS if row["answer"] not in no_golds]
    swapped = outcomes([(row["answer"], row["gold"]) for row in rows])
    other = [
        (row["gold"], row["answer"]) for row, found in zip(rows, swapped, strict=True) if (found == "right") != row["same"]
    ]
    assert other == [
        (r"\frac{3}{56}", r"\frac{3}{56}\approx 7"),  # what a gold is rounded to is not looked at
        (r"\sqrt{2}", r"\sqrt{2}\approx 1.5"),
        ("5", r"5 \approx 6"),
        (r"0.5\%", "0.5"),
        ("0.5", r"0.5\%"),
        ("5", r"5\text{ big red apples}"),
        (r"5\text{ red apples}", "5"),
        ("1011_2", "1011"),
        ("5", "5_6"),
        ("4", "2+2=4"),
        ("x=1, y=2", "2,1"),
        ("5", "[5,5]"),
        ("ABC", r"C\cdot B\cdot A"),
        ("ABC", "CBA=ABC"),  # of a gold it is a name
        ("5", r"\phantom{5}"),
    ]
    assert sorted(no_golds) == sorted(["0.333...", "2 0 4", "2$0$4", "3'", "5_x"])


def test_modes_agree_on_whole_numbers() -> None:
    rng = random.Random(0)
    pairs = [(row["gold"], row["answer"]) for row in ROWS if row["topic"] == "integers"]
    pairs += [(str(rng.randint(-20, 20)), str(rng.randint(-20, 20))) for _ in range(2000)]
    expected = ["right" if gold == answer else "wrong" for gold, answer in pairs]
    assert outcomes(pairs) == outcomes(pairs, mode="exact") == expected
    assert {"right", "wrong"} == set(expected[5:])
    small = [(gold, answer) for gold, answer in pairs if "-" not in gold + answer and len(gold + answer) < 7]
    assert outcomes(small, mode="integer") == outcomes(small)


@pytest.mark.parametrize(
    ("gold", "answer", "outcome"),
    [
        ("25", "25", "right"),
        ("25", "025", "right"),
        ("025", "25", "right"),
        ("0", "000", "right"),
        ("999", "$999$.", "right"),
        ("25", "25.0", "wrong"),  # the sheet takes digits
        ("25", "0025", "wrong"),  # three of them
        ("25", "+25", "wrong"),
        ("25", "-25", "wrong"),
        ("25", "x=25", "wrong"),
        ("25", r"\frac{50}{2}", "wrong"),
        ("25", r"25^\circ", "right"),
        ("25", r"\text{25}", "right"),
        ("25", "２５", "right"),
        ("25", r"25\%", "wrong"),
        ("204", "2 0 4", "wrong"),  # numbers apart
        ("204", "2$0$4", "wrong"),
        ("12", "1 2", "wrong"),
        ("12", "1,2", "wrong"),
    ],
)
def test_integer_mode_reads_an_answer_sheet(gold: str, answer: str, outcome: str) -> None:
    assert outcomes([(gold, answer)], mode="integer") == [outcome]


@pytest.mark.parametrize(
    ("gold", "answer", "outcome"),
    [
        ("a b", "ab.", "right"),
        ("ab", "$a b$", "right"),
        (r"\$5", "5", "right"),
        ("1000", "1,000", "wrong"),
        ("12", "1 2", "wrong"),
        ("12", "1$2", "wrong"),
        ("1 2", "1  2", "right"),
        ("0.5", "1/2", "wrong"),
        ("Yes", "yes", "wrong"),
    ],
)
def test_exact_mode_compares_letters(gold: str, answer: str, outcome: str) -> None:
    assert outcomes([(gold, answer)], mode="exact") == [outcome]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234,567.5", "2469135/2"),
        ("12 345", "12345"),
        ("- 7", "-7"),
        (r"-\frac{3}{-4}", "3/4"),
        ("0.5 / 0.25", "2"),
        (r"-2\frac{1}{3}", "-7/3"),
        (r"2.5\cdot 10^{-3}", "1/400"),
        (r"0.1\overline{6}", "1/6"),
        (r"12.\overline{09}", "133/11"),
        ("1,23", None),
        ("1/0", None),
        ("2 3", None),
        (r"2\frac{5}{3}", None),  # a product
        ("1e401", None),
        (r"\frac{x}{2}", None),
        ("７", None),
    ],
)
def test_numbers_are_read_exactly(text: str, value: str | None) -> None:
    found = rational(text)
    assert (None if found is None else str(found)) == value


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (r"5\mathrm{cm}^{2}", ("5", "centimeter^2")),
        ("5 sq. cm", ("5", "centimeter^2")),
        ("5 square centimetres", ("5", "centimeter^2")),
        (r"60 \text{ miles per hour}", ("60", "mile/hour")),
        ("60 mph", ("60", "mile/hour")),
        (r"-\$ 5", ("-5", "dollar")),
        (r"2\pi\text{ inches}", (r"2\pi", "inch")),
        ("7 apples", ("7", "apple")),
        (r"\text{cm}", (r"\text{cm}", None)),
        ("2x", ("2x", None)),
        ("2abcd", ("2abcd", None)),
        (r"2 \sin x", (r"2 \sin x", None)),
        (r"6\text{ to }7", (r"6\text{ to }7", None)),
        (r"3\text{ hundred dollars}", (r"3\cdot 10^{2}", "dollar")),
        (r"16\text{ years old}", ("16", "year")),
        ("5 halves", ("5 halves", None)),
        (r"5\text{ squared}", (r"5\text{ squared}", None)),
        (r"5\text{ M}", (r"5\text{ M}", None)),
    ],
)
def test_units_are_split_off(text: str, parts: tuple[str, str | None]) -> None:
    assert split_unit(tidy(text)) == parts


# Golds.


@pytest.mark.parametrize(
    ("gold", "mode", "message"),
    [
        (r"\frac{1}{", "math", "does not parse"),
        ("2 3", "math", "does not parse"),
        ("x ==", "math", "does not parse"),
        (r"x \ne y", "math", "does not parse"),
        ("5_x", "math", "does not parse"),
        ("", "math", "is empty"),
        ("$ $", "exact", "is empty"),
        ("1" * 1001, "math", "is longer than 1000 characters"),
        ("1000", "integer", "is not a whole number from 0 to 999"),
        ("-1", "integer", "is not a whole number from 0 to 999"),
        (r"\frac{1}{1+" * 60 + "1" + "}" * 60, "math", "does not parse: nested too deeply"),
    ],
)
def test_a_gold_that_nothing_compares_with_is_refused(gold: str, mode: verify.Mode, message: str) -> None:
    assert re.search(message, check_golds([gold], mode, timeout_s=60)[gold])
    if "parse" not in message:
        with pytest.raises(ValueError, match=message):
            verify_answers([r"\boxed{\sqrt{3}}"], [gold], mode)
    elif "deeply" not in message:  # those that come to be compared all the same end no run
        assert outcomes([(gold, r"\sqrt{3}")]) == ["unverified"]


def test_a_gold_that_raises_beside_one_answer_is_unverified_there_and_nowhere_else() -> None:
    golds = [r"P=25\%", r"0.56 = 56\%", "x=5", "y=2x+1"]
    assert check_golds(golds) == {}
    assert outcomes([(golds[0], "x=1"), (golds[0], r"25\%"), (golds[0], "0.25"), (golds[0], "3")]) == [
        "unverified", "right", "right", "wrong",
    ]  # fmt: skip
    assert outcomes([(golds[1], answer) for answer in ("0.56", r"56\%", r"0.56=56\%", "0.57", "x=1")]) == [
        "right", "right", "right", "wrong", "wrong",
    ]  # fmt: skip


def test_a_gold_that_no_other_answer_can_be_compared_with_is_refused() -> None:
    matrices = r"A=\begin{pmatrix}1&2\\3&4\end{pmatrix}, B=\begin{pmatrix}1&0\\0&1\end{pmatrix}"
    assert check_golds([matrices]) == {matrices: "does not parse"}


def test_golds_are_checked_many_at_a_time() -> None:
    golds = ["5", r"\sqrt{2}", r"\sqrt{", "odd", r"\text{June 20}", "", r"10\%", r"x \ne 1", "CBA"]
    assert check_golds(golds) == {r"\sqrt{": "does not parse", "": "is empty"}
    assert check_golds(["025"], "integer") == {}


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="1 responses and 2 golds"):
        verify_answers(["a"], ["1", "2"])
    with pytest.raises(ValueError, match="mode is 'maths'; it must be one of math, exact, integer, number"):
        verify_answers([], [], "maths")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout_s is 0; it must be > 0 and finite"):
        verify_answers([], [], timeout_s=0)
    with pytest.raises(ValueError, match="memory_mb is inf; it must be > 0 and finite"):
        check_golds(["1"], memory_mb=float("inf"))
    assert verify_answers([], []) == []


def test_modes_agree_on_whole_numbers_to_999_without_leading_zeros_and_not_beyond() -> None:
    pairs = [(str(gold), str(answer)) for gold in (0, 7, 25, 100, 999) for answer in (0, 7, 25, 52, 100, 998, 999)]
    found = [outcomes(pairs, mode=mode) for mode in ("math", "exact", "integer")]
    assert found[0] == found[1] == found[2] == ["right" if gold == answer else "wrong" for gold, answer in pairs]
    assert [outcomes([("25", "025")], mode=mode) for mode in ("math", "exact", "integer")] == [["right"], ["wrong"], ["right"]]
    assert [outcomes([("1000", "1000")], mode=mode) for mode in ("math", "exact")] == [["right"], ["right"]]
    with pytest.raises(ValueError, match="not a whole number from 0 to 999"):
        outcomes([("1000", "1000")], mode="integer")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("6 * 12\n#### 72", "72"),
        ("#### 71, no\n####  72 \nthat is it", "72"),
        ("####\n72", "72"),
        (r"#### 72 \boxed{71}", r"72 \boxed{71}"),
        ("72 ####", ""),
        (r"\boxed{72}", None),
        ("", None),
    ],
)
def test_what_follows_the_last_hashes_is_the_answer_where_it_is_asked_for(text: str, answer: str | None) -> None:
    assert after_hashes(text) == answer
    for mode in ("math", "exact", "integer"):
        (verdict,) = verify_answers([text], ["72"], mode, answer_in="hashes")
        assert verdict.outcome == ("right" if answer == "72" else "wrong" if answer else "no_answer")
