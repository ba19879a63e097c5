"""Tasks on data sets, and arithmetic: what is right, and what counts as one answer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from support.task_files import jsonl
from support.tasks import dataset

from bapo.tasks.answers import last_box, number
from bapo.tasks.arithmetic import Arithmetic
from bapo.tasks.dataset import DatasetTask
from bapo.tasks.verify import Verdict
from bapo.types import Prompt


def rewards(task: DatasetTask, gold: str, *responses: str) -> list[float | None]:
    return task.verify([Prompt("p", "q", gold)] * len(responses), responses)


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (r"So the answer is \boxed{72}.", 1.0),
        (r"\boxed{72", 0.0),
        (r"\boxed{71} no, \boxed{72}", 1.0),
        (r"\boxed{72} no, \boxed{71}", 0.0),
        (r"\boxed{72} and then \boxed{7", 1.0),  # the last complete one
        (r"\boxed{ $72. }", 1.0),
        (r"\boxed{\$72.00}", 1.0),
        (r"\boxed{72.5}", 0.0),
        (r"\boxed{7 2}", 0.0),  # two numbers
        (r"\boxed{7, 2}", 0.0),
        (r"\boxed{7,2}", 0.0),
        (r"\boxed{7$2}", 0.0),
        (r"\boxed{$ 72 $}", 1.0),
        (r"\boxed{{72}}", 1.0),
        (r"\boxed{\text{72}}", 1.0),
        (r"\boxed{72\%}", 1.0),
        (r"\boxed{72 \text{ dollars}}", 1.0),
        (r"\boxed{72\text{ million}}", 0.0),
        (r"\boxed{48+24}", 0.0),  # mode math would let it pass
        (r"\boxed{x = \boxed{72}}", 0.0),  # one box inside another
        (r"\boxed{}", 0.0),
        (r"\boxed{-72}", 0.0),
        (r"\boxed{+72}", 1.0),
        (r"\boxed{７２}", 1.0),
        ("#### 72", 0.0),
        ("The answer is 72.", 0.0),
        ("boxed{72}", 0.0),
        ("", 0.0),
    ],
)
def test_gsm8k_only_the_last_complete_box_counts(response: str, reward: float) -> None:
    assert rewards(dataset("gsm8k"), "72", response) == [reward]


def test_gsm8k_numbers_are_compared_as_numbers() -> None:
    assert rewards(dataset("gsm8k"), "1120000", r"\boxed{1,120,000}", r"\boxed{1120000.0}") == [1.0, 1.0]
    assert rewards(dataset("gsm8k"), "-5.50", r"\boxed{-5.5}", r"\boxed{−5.5}") == [1.0, 1.0]
    assert rewards(dataset("gsm8k"), "70000", r"\boxed{70{,}000}", r"\boxed{70\,000}", r"\boxed{70{,}00}") == [1.0, 1.0, 0.0]
    assert rewards(dataset("gsm8k"), "9007199254740993", r"\boxed{9007199254740992}") == [0.0]  # one float64 for both
    assert [number(text) for text in ("1.2.3", "1e3", "", ".", "-", "nan", "0x10")] == [None] * 7
    said = [dataset("gsm8k").answer(rf"\boxed{{{box}}}") for box in ("72", "$72.00", "+0,072", "-0.50", "-0", "1e3", "7.")]
    assert said == ["72", "72", "72", "-0.5", "0", None, "7"]
    assert dataset("gsm8k").answer(r"\boxed{12345678901234567890123456789012345.60}") == "12345678901234567890123456789012345.6"
    assert dataset("gsm8k").answer("72") is None


def test_boxes_nest_and_a_flood_of_open_ones_takes_no_time() -> None:
    assert last_box(r"\boxed{\frac{1}{2}} x} {") == r"\frac{1}{2}"
    assert last_box(r"} \boxed{a} \notboxed{b} {c}") == "a"
    start = time.perf_counter()
    assert last_box(r"\boxed{" * 100_000) is None
    assert last_box(r"\boxed{7}" + r"\boxed{" * 100_000) == "7"
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize("task", [dataset("aime24"), dataset("aime25")], ids=lambda task: task.name)
def test_aime_answers_are_whole_numbers_as_on_the_answer_sheet(task: DatasetTask) -> None:
    boxes = ("25", "025", "25.0", "x=25", "26", r"\frac{50}{2}")
    assert rewards(task, "025", *[rf"\boxed{{{box}}}" for box in boxes], "25") == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert [task.answer(rf"\boxed{{{box}}}") for box in boxes] == ["25", "25", None, None, "26", None]


@pytest.mark.parametrize("task", [dataset("math500"), dataset("skywork")], ids=lambda task: task.name)
def test_mathematical_answers_are_compared_by_value(task: DatasetTask) -> None:
    boxes = (r"\frac12", "0.5", r"\sqrt{\frac14}", "x=0.5", "0.4", "")
    assert rewards(task, r"\frac{1}{2}", *[rf"\boxed{{{box}}}" for box in boxes], "0.5") == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    said = [task.answer(rf"\boxed{{{box}}}") for box in (*boxes[:3], r"\text{Even}", "EVEN", "1,000.0", " ", "9" * 1001)]
    assert said == ["1/2", "1/2", r"\sqrt{\frac{1}{4}}", "even", "even", "1000", None, None]
    assert task.answer("0.5") is None


def test_votes_for_one_answer_are_counted_together() -> None:
    said = [
        [dataset("math500").answer(rf"\boxed{{{box}}}") for box in boxes]
        for boxes in (
            ("28", r"28\%", r"28 \text{ percent}", "028.0"),
            ("5", r"5\text{ cm}", "x=5", r"x = 5\text{ apples}", r"\$5", "5."),
            ("1,2", "2, 1", r"\{2,1\}", r"x=1\text{ or }x=2", "x=2, x=1"),
            ("(2,1)", r"\left( 2, 1 \right)", "y=1, x=2"),
            ("1,000", "1000"),
            ("ABC", "A B C", r"\text{ABC}"),
            (r"2 \sqrt{3}", r"2\sqrt{3}", r"2\sqrt3"),
        )
    ]
    assert [set(votes) for votes in said] == [{"28"}, {"5"}, {"1,2"}, {"(2,1)"}, {"1000"}, {"abc"}, {r"2\sqrt{3}"}]
    apart = ("5", "-5", "5_6", r"5\text{ hundred}", "5 halves", "1,2", "(1,2)", "[1,2]", "x+1", "1/5", "5,5", "x>5", "BAC")
    assert len({dataset("math500").answer(rf"\boxed{{{box}}}") for box in apart}) == len(apart)


def test_modes_of_files(tmp_path: Path) -> None:
    path = str(jsonl(tmp_path / "rows.jsonl", [{"question": "q", "answer": "1"}]))
    for mode, expected in (("math", [1.0, 1.0]), ("exact", [1.0, 0.0]), ("integer", [1.0, 0.0])):
        for task in (dataset("files", train=path, mode=mode), dataset("verl_format", train=path, mode=mode)):  # type: ignore[arg-type]
            assert rewards(task, "5", r"\boxed{$5$}", r"\boxed{5.0}") == expected
    said = [dataset("files", train=path, mode="exact").answer(rf"\boxed{{{box}}}") for box in ("$A b$.", "")]
    assert said == ["Ab", None]


@pytest.mark.parametrize("name", ["files", "verl_format"])
def test_answers_after_hashes_are_graded_in_the_same_modes(name: str, tmp_path: Path) -> None:
    path = str(jsonl(tmp_path / "rows.jsonl", [{"question": "q", "answer": "1"}]))
    for mode, expected in (("math", [1.0, 1.0, 0.0]), ("exact", [1.0, 0.0, 0.0]), ("integer", [1.0, 0.0, 0.0])):
        task = dataset(name, train=path, mode=mode, answer_in="hashes")
        assert rewards(task, "5", "so\n#### 5", "#### 5.0", r"\boxed{5}") == expected
        assert task.answer("#### 1\n#### 5\nbye") == "5"
        assert task.answer(r"\boxed{5}") is None
    with pytest.raises(ValueError, match=r"task\.answer_in is 'tag'; it must be one of box, hashes"):
        dataset(name, train=path, answer_in="tag")


def test_files_ask_for_the_answer_where_it_is_looked_for(tmp_path: Path) -> None:
    path = str(jsonl(tmp_path / "rows.jsonl", [{"question": "q", "answer": "1"}]))
    asked = {
        answer_in: dataset("files", train=path, answer_in=answer_in).prompts("train")[0].text for answer_in in ("box", "hashes")
    }  # type: ignore[arg-type]
    assert "\\boxed{}" in asked["box"]
    assert '"####"' in asked["hashes"]
    assert "boxed" not in asked["hashes"]
    assert dataset("files", train=path, answer_in="hashes", instruction=" Go.").prompts("train")[0].text == "q Go."


def test_many_responses_without_one_answer_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    for task in (dataset("gsm8k"), dataset("math500")):
        caplog.clear()
        rewards(task, "5", *["#### 5"] * 63)
        rewards(task, "5", *["#### 5"] * 63, r"\boxed{6}")
        assert caplog.messages == []
        for _ in range(2):
            rewards(task, "5", *["#### 5"] * 64)
        (said,) = caplog.messages
        assert said.startswith(f"task {task.name}: not one of 64 responses has an answer in a \\boxed{{...}}")


def test_what_could_not_be_verified_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rewards(dataset("math500"), "5", r"\boxed{" + "1+" * 600 + "1}", r"\boxed{5}") == [
        None,
        1.0,
    ]  # more than 1000 characters
    outcomes = ("unverified", "right", "wrong", "no_answer")
    verdicts = [Verdict(outcome, "") for outcome in outcomes]
    monkeypatch.setattr("bapo.tasks.dataset.verify_answers", lambda responses, golds, mode, answer_in: verdicts)
    assert rewards(dataset("math500"), "1", *[""] * 4) == [None, 1.0, 0.0, 0.0]


# Arithmetic


def test_every_question_has_its_answer() -> None:
    asked = Arithmetic(largest=12, train_size=365, test_size=64)
    prompts = [*asked.prompts("train"), *asked.prompts("test")]
    assert len({p.text for p in prompts}) == 13 * 13 + 13 * 14 // 2 + 13 * 13 == len(prompts)
    for prompt in prompts:
        a, sign, b, equals, mark = prompt.text.split(" ")
        assert (equals, mark) == ("=", "?")
        assert prompt.answer == str({"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign])
        assert max(int(a), int(b)) <= 12
        assert not prompt.answer.startswith("-")


def test_splits_do_not_overlap_and_repeat_with_their_seed() -> None:
    task = Arithmetic()
    train, test = task.prompts("train"), task.prompts("test")
    assert (len(train), len(test)) == (320, 64)
    assert not {p.text for p in train} & {p.text for p in test}
    assert len({p.uid for p in (*train, *test)}) == 384
    assert Arithmetic(train_size=5).prompts("test") == test
    assert [p.text for p in Arithmetic(seed=1).prompts("test")] != [p.text for p in test]
    assert {p.text.split()[1] for p in Arithmetic(operations=["-"], train_size=10, test_size=10).prompts("train")} == {"-"}


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("12", 1.0),
        ("12.", 1.0),
        (" 7 + 5 = 12\n", 1.0),
        ("7+5=12.", 1.0),
        ("13", 0.0),
        ("7 + 5 = 13", 0.0),
        ("5 + 7 = 12", 0.0),
        ("= 12", 0.0),
        ("12..", 0.0),
        ("012", 0.0),
        ("The answer is 12", 0.0),
        ("7 + 5 = 12 = 12", 0.0),
        ("7 + 5 = 12, because", 0.0),
        ("", 0.0),
    ],
)
def test_the_number_or_the_equation_and_nothing_else_is_right(response: str, reward: float) -> None:
    assert Arithmetic().verify([Prompt("p", "7 + 5 = ?", "12")], [response]) == [reward]


def test_arithmetic_votes_count_the_number_alone() -> None:
    said = [Arithmetic().answer(response) for response in ("12", "7 + 5 = 12.", " 1 2", "7 + 5 =", "")]
    assert said == ["12", "12", "12", None, None]


def test_demonstrations_are_poor_and_leave_the_test_split_out() -> None:
    task = Arithmetic()
    held_out, answers = {p.text for p in task.prompts("test")}, {p.text: p.answer for p in task.prompts("train")}
    pairs = Arithmetic(train_size=365).demonstrations(2000, 0)
    answers |= {p.text: p.answer for p in Arithmetic(train_size=365).prompts("train")}
    assert not {text for text, _ in pairs} & held_out
    right = sum(answers[text] == said for text, said in pairs) / len(pairs)
    assert 0.42 < right < 0.52  # 0.4 known, and one guess of eleven; 0 is guessed more often
    assert {c for pair in pairs for c in "".join(pair)} <= set(task.alphabet)
    assert task.demonstrations(5, 0) != task.demonstrations(5, 1)
    assert task.demonstrations(5, 1) == task.demonstrations(5, 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"operations": []}, r"task.operations is \[\]; it must be some of \+, -, \*, each once"),
        ({"operations": ["+", "/"]}, r"task.operations is \['\+', '/'\]"),
        ({"operations": ["+", "+"]}, r"task.operations is \['\+', '\+'\]"),
        ({"largest": 0}, "task.largest is 0; it must be >= 1"),
        ({"test_size": 0}, "task.test_size is 0; it must be >= 1"),
        ({"train_size": 400}, "train_size .* is 464; with task.largest = 12 it must be <= 429, the number of different"),
    ],
)
def test_arithmetic_out_of_bounds_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Arithmetic(**fields)
    with pytest.raises(ValueError, match="split is 'dev'"):
        Arithmetic().prompts("dev")  # type: ignore[arg-type]
