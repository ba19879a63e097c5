"""The digit operations by hand, their grader, their splits, and the frequencies of their demonstrator."""

import pytest

from bapo.tasks.digit_ops import ALPHABET, EOS, OPERATIONS, RIGHT_OPERATION, DigitOps
from bapo.types import Prompt


@pytest.mark.parametrize(
    ("letter", "answer"),
    [("a", "23589"), ("b", "98532"), ("c", "58392"), ("d", "29385"), ("e", "83925"), ("f", "25839")],
)
def test_operation_by_hand(letter: str, answer: str) -> None:
    assert OPERATIONS[letter]("58392") == answer


def test_operations_keep_leading_zeros_and_repeats() -> None:
    assert [OPERATIONS[letter]("00730") for letter in "abcdef"] == ["00037", "73000", "00730", "03700", "07300", "00073"]


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("98532", 1.0),
        ("23589x98532", 1.0),
        ("23589x58392x98532", 1.0),
        ("98532x98532x98532", 1.0),
        ("98532x23589", 0.0),  # only the last attempt counts
        ("23589x58392x29385x98532", 0.0),  # right, at the fourth attempt
        ("98532x98532x98532x98532", 0.0),
        ("", 0.0),
        ("x", 0.0),
        ("98532x", 0.0),
        ("9853", 0.0),
        ("985322", 0.0),
        (" 98532", 0.0),
        ("b58392=98532", 0.0),
        ("98532.", 0.0),
    ],
)
def test_verify(response: str, reward: float) -> None:
    assert DigitOps().verify([Prompt("u", "b58392=", "98532")], [response]) == [reward]


def test_every_response_is_graded_by_the_prompt_at_its_place() -> None:
    prompts = [Prompt("u", "c12=", "12"), Prompt("v", "d12=", "21")]
    assert DigitOps().verify(prompts, ["12", "12"]) == [1.0, 0.0]
    assert DigitOps().verify(prompts, ["21", "21"]) == [0.0, 1.0]


def test_the_answer_is_the_last_attempt() -> None:
    said = [DigitOps().answer(response) for response in ("12", "21x12", "1x2x3", "1x2x3x4", "12x", "")]
    assert said == ["12", "12", "3", None, None, None]


def test_verify_with_one_attempt_refuses_a_retry() -> None:
    task, prompt = DigitOps(max_attempts=1), Prompt("u", "c12=", "12")
    assert task.verify([prompt] * 2, ["12", "21x12"]) == [1.0, 0.0]


def test_exactness_counts_where_operations_agree() -> None:
    """On sorted digits, sorting up and copying are the same answer."""
    assert DigitOps().verify([Prompt("u", "a12345=", "12345")], [OPERATIONS["c"]("12345")]) == [1.0]


def test_prompts_hold_the_answer_of_their_own_text() -> None:
    for split in ("train", "test"):
        for prompt in DigitOps(train_size=300, test_size=300).prompts(split):
            letter, digits = prompt.text[0], prompt.text[1:6]
            assert prompt.text == f"{letter}{digits}="
            assert digits.isdigit()
            assert prompt.answer == OPERATIONS[letter](digits)


def test_splits_are_disjoint_and_distinct() -> None:
    task = DigitOps(train_size=5000, test_size=500)
    train, test = task.prompts("train"), task.prompts("test")
    assert (len(train), len(test)) == (5000, 500)
    assert len({p.text for p in [*train, *test]}) == 5500
    assert len({p.uid for p in [*train, *test]}) == 5500
    assert (train[17].uid, test[3].uid) == ("digit_ops/train/17", "digit_ops/test/3")


def test_the_whole_space_can_be_asked_for() -> None:
    task = DigitOps(digits=2, train_size=500, test_size=100)
    texts = {p.text for split in ("train", "test") for p in task.prompts(split)}
    assert texts == {f"{letter}{number:02d}=" for letter in "abcdef" for number in range(100)}


def test_splits_depend_on_the_seed_alone() -> None:
    assert DigitOps(seed=3).prompts("train") == DigitOps(seed=3).prompts("train")
    assert DigitOps(seed=3, train_size=10).prompts("test") == DigitOps(seed=3, train_size=9000).prompts("test")
    assert DigitOps(seed=3).prompts("test") != DigitOps(seed=4).prompts("test")
    # Pinned: another Python version must not move the held-out set.
    assert [p.text for p in DigitOps().prompts("test")[:3]] == ["f15353=", "a39691=", "c33329="]
    assert DigitOps().demonstrations(2, seed=0) == [("d58069=", "96085"), ("c20399=", "02399x02399x03992")]


def test_demonstrations_are_deterministic_and_avoid_the_test_split() -> None:
    task = DigitOps(digits=2, train_size=100, test_size=500)
    pairs = task.demonstrations(2000, seed=5)
    assert pairs == task.demonstrations(2000, seed=5)
    assert pairs != task.demonstrations(2000, seed=6)
    assert not {text for text, _ in pairs} & {p.text for p in task.prompts("test")}
    assert set("".join(text + response for text, response in pairs)) <= set(ALPHABET)
    assert EOS not in ALPHABET
    assert len(set(ALPHABET)) == len(ALPHABET)


def test_demonstrator_frequencies() -> None:
    """Standard errors at about 10,000 prompts a letter are below 0.006; the tolerances are about four of them."""
    task = DigitOps()
    pairs = task.demonstrations(60_000, seed=1)
    distinct = [(text, response.split("x")) for text, response in pairs if len(set(text[1:6])) == 5]  # operations seldom agree
    for letter, p in RIGHT_OPERATION.items():
        attempts = [tries for text, tries in distinct if text[0] == letter]
        answers = [OPERATIONS[letter](text[1:6]) for text, _ in distinct if text[0] == letter]
        first_right = sum(tries[0] == answer for tries, answer in zip(attempts, answers, strict=True)) / len(attempts)
        # Five digits pass the 2 % noise unchanged with 0.98 ** 5 = 0.904; another operation agrees by chance in under 2 %.
        once = p * 0.98**5
        assert first_right == pytest.approx(once, abs=0.03)
        solved = sum(tries[-1] == answer for tries, answer in zip(attempts, answers, strict=True)) / len(attempts)
        assert solved == pytest.approx(1 - (1 - first_right) ** 3, abs=0.03)  # a retry is as good as a first try
        for tries, answer in zip(attempts, answers, strict=True):
            assert answer not in tries[:-1]  # what is right is never withdrawn
            assert len(tries) == 3 or tries[-1] == answer  # what is wrong is retried while it can be
    copies = [(text[1:6], tries[0]) for text, tries in distinct if text[0] == "a"]
    copied = sum(digits == first for digits, first in copies) / len(copies)
    assert copied == pytest.approx(0.5 / 5 * 0.98**5, abs=0.025)  # another operation is one of five, uniformly


def test_demonstrator_noise() -> None:
    """Right operation or not, an attempt that is no permutation of its digits was noised: 1 - 0.98 ** 5 = 0.096 of them."""
    pairs = DigitOps().demonstrations(20_000, seed=2)
    noised = sum(sorted(response[:5]) != sorted(text[1:6]) for text, response in pairs) / len(pairs)
    assert noised == pytest.approx(0.096, abs=0.01)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"digits": 1}, r"digits is 1; it must be in \[2, 16\]"),
        ({"digits": 17}, "digits is 17"),
        ({"train_size": 0}, "train_size is 0; it must be >= 1"),
        ({"test_size": -1}, "test_size is -1"),
        ({"max_attempts": 0}, "max_attempts is 0"),
        ({"digits": 2, "train_size": 500, "test_size": 101}, r"train_size \+ test_size is 601.* <= 600"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DigitOps(**fields)


def test_unknown_split_is_named() -> None:
    with pytest.raises(ValueError, match="split is 'dev'"):
        DigitOps().prompts("dev")  # type: ignore[arg-type]
