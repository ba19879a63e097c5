"""GSM8K and arithmetic: what is read, what is asked, what is right. FAULTS 58."""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bapo.tasks.arithmetic import Arithmetic
from bapo.tasks.gsm8k import GSM8K, INSTRUCTION, last_box, number
from bapo.types import Prompt
from bapo.warm_start import WarmStart

ROWS = [
    {"question": "Natalia sold 48 clips and half as many more. How many?", "answer": "48/2=<<48/2=24>>24\n48+24=72\n#### 72"},
    {"question": "  A house costs 80,000 and 40,000 more?  ", "answer": "So #### 3\nno: #### 1,120,000"},
    {"question": "How cold is it?", "answer": "It is\n#### -5.50"},
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the library keeps of the files it has read stays inside the test."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf_datasets")


def folder(tmp_path: Path, rows: list[dict[str, Any]], splits: tuple[str, ...] = ("train", "test")) -> str:
    """A local data set: one JSONL file per split."""
    where = tmp_path / "data"
    where.mkdir(parents=True, exist_ok=True)
    for split in splits:
        (where / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(where)


def test_rows_of_the_public_schema_become_prompts(tmp_path: Path) -> None:
    task = GSM8K(folder(tmp_path, ROWS))
    train = task.prompts("train")
    assert [(p.uid, p.text.removesuffix(INSTRUCTION), p.answer) for p in train] == [
        ("gsm8k/train/0", ROWS[0]["question"], "72"),
        ("gsm8k/train/1", "A house costs 80,000 and 40,000 more?", "1120000"),
        ("gsm8k/train/2", "How cold is it?", "-5.50"),
    ]
    assert all(p.text.endswith("put your final answer within \\boxed{}.") for p in train)
    assert [p.uid for p in GSM8K(task.path, test_size=1).prompts("test")] == ["gsm8k/test/0"]
    assert task.prompts("train") is train  # read once


def test_parquet_files_and_the_configs_of_a_readme_are_read(tmp_path: Path) -> None:
    """As a snapshot of the hub lies on disk."""
    import datasets

    (tmp_path / "snapshot").mkdir()
    for config, answer in (("main", "1"), ("socratic", "2")):
        rows = datasets.Dataset.from_list([{"question": "q", "answer": f"#### {answer}"}])
        rows.to_parquet(tmp_path / "snapshot" / config / "test-00000-of-00001.parquet")
    files = "".join(f"- config_name: {c}\n  data_files:\n  - split: test\n    path: {c}/test-*\n" for c in ("main", "socratic"))
    (tmp_path / "snapshot" / "README.md").write_text(f"---\nconfigs:\n{files}---\n")
    for config, answer in (("main", "1"), ("socratic", "2")):
        assert [p.answer for p in GSM8K(str(tmp_path / "snapshot"), name=config).prompts("test")] == [answer]


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
        (r"\boxed{7 2}", 1.0),
        (r"\boxed{{72}}", 0.0),  # what is in the box is no number
        (r"\boxed{\text{72}}", 0.0),
        (r"\boxed{x = \boxed{72}}", 1.0),
        (r"\boxed{}", 0.0),
        (r"\boxed{-72}", 0.0),
        (r"\boxed{+72}", 1.0),
        (r"\boxed{７２}", 0.0),
        ("#### 72", 0.0),
        ("The answer is 72.", 0.0),
        ("boxed{72}", 0.0),
        ("", 0.0),
    ],
)
def test_only_the_last_complete_box_counts(response: str, reward: float) -> None:
    assert GSM8K().verify(Prompt("p", "q", "72"), response) == reward


def test_numbers_are_compared_as_numbers() -> None:
    large = Prompt("p", "q", "1120000")
    assert GSM8K().verify(large, r"\boxed{1,120,000}") == GSM8K().verify(large, r"\boxed{1120000.0}") == 1.0
    assert GSM8K().verify(Prompt("p", "q", "-5.50"), r"\boxed{-5.5}") == 1.0
    assert GSM8K().verify(Prompt("p", "q", "9007199254740993"), r"\boxed{9007199254740992}") == 0.0  # one float64 for both
    assert [number(text) for text in ("1.2.3", "1e3", "", ".", "-", "nan", "0x10")] == [None] * 7


def test_boxes_nest_and_a_flood_of_open_ones_takes_no_time() -> None:
    assert last_box(r"\boxed{\frac{1}{2}} x} {") == r"\frac{1}{2}"
    assert last_box(r"} \boxed{a} \notboxed{b} {c}") == "a"
    start = time.perf_counter()
    assert last_box(r"\boxed{" * 100_000) is None
    assert last_box(r"\boxed{7}" + r"\boxed{" * 100_000) == "7"
    assert time.perf_counter() - start < 2


def test_rows_that_cannot_be_judged_are_listed(tmp_path: Path) -> None:
    bad = [
        {"question": "q", "answer": "72"},
        {"question": "   ", "answer": "#### 1"},
        {"question": "q", "answer": "#### seven"},
        {"question": "q", "answer": None},
    ]
    path = folder(tmp_path, [ROWS[0], *bad, ROWS[1]])
    with pytest.raises(ValueError, match=r"split 'train' has rows without a question or .* '####': 1, 2, 3, 4$") as refused:
        GSM8K(path).prompts("train")
    assert f"task.path is {path!r}" in str(refused.value)
    assert len(GSM8K(path, train_size=1).prompts("train")) == 1  # rows that are not asked for do not matter
    path = folder(tmp_path, bad[:1] * 12)
    with pytest.raises(ValueError, match=r"'####': 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, \.\.\. \(12 in all\)"):
        GSM8K(path).prompts("train")


def test_data_that_cannot_be_had_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    file = tmp_path / "rows.jsonl"
    file.write_text("{}\n")
    local = folder(tmp_path, ROWS, ("train",))
    for task, split, message in (
        (GSM8K("openai/gsm8k"), "train", "task.path is 'openai/gsm8k'; split 'train' could not be loaded: ConnectionError"),
        (GSM8K(str(tmp_path / "none")), "train", "could not be loaded: FileNotFoundError"),
        (GSM8K(str(tmp_path / "empty")), "train", "could not be loaded: "),
        (GSM8K(local), "test", "split 'test' could not be loaded: ValueError"),
        (GSM8K(str(file)), "train", "name the folder that holds a file for each split"),
        (GSM8K(local, train_size=4), "train", "task.train_size is 4; it must be <= 3, the rows of"),
        (
            GSM8K(folder(tmp_path / "other", [{"problem": "q", "answer": "#### 1"}])),
            "test",
            "no column question (it has problem, answer)",
        ),
    ):
        with pytest.raises(ValueError) as refused:  # noqa: PT011  the message is what counts
            task.prompts(split)  # type: ignore[arg-type]
        assert message in str(refused.value)
        assert len(str(refused.value).splitlines()) == 1


def test_a_data_set_with_code_of_its_own_is_refused_and_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    given: dict[str, Any] = {}
    real = datasets.load_dataset

    def load(*args: Any, **kwargs: Any) -> Any:
        given.update(kwargs)
        return real(*args, **kwargs)

    monkeypatch.setattr(datasets, "load_dataset", load)
    where, sentinel = tmp_path / "scripted", tmp_path / "ran"
    where.mkdir()
    (where / "scripted.py").write_text(f"open({str(sentinel)!r}, 'w')\n")
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ValueError, match="split 'train' could not be loaded"):
        GSM8K(str(where)).prompts("train")
    assert not sentinel.exists()
    assert given["trust_remote_code"] is False


def test_gsm8k_out_of_bounds_is_refused() -> None:
    for field in ("train_size", "test_size"):
        with pytest.raises(ValueError, match=f"task.{field} is 0; it must be >= 1, or null"):
            GSM8K(**{field: 0})
    with pytest.raises(ValueError, match="split is 'dev'; it must be 'train' or 'test'"):
        GSM8K().prompts("dev")  # type: ignore[arg-type]


def test_a_task_without_demonstrations_wants_a_model_of_its_own(tmp_path: Path) -> None:
    start = WarmStart(cache_dir=str(tmp_path))
    for call in (start, start.config):
        with pytest.raises(ValueError, match=r"task is GSM8K, which has no demonstrations .*: choose a model"):
            call(GSM8K())
    assert not list(tmp_path.iterdir())


def test_the_library_is_the_pinned_one() -> None:
    pins = (Path(__file__).parents[1] / "requirements.txt").read_text()
    assert f"datasets=={importlib.metadata.version('datasets')} " in pins


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
    assert Arithmetic().verify(Prompt("p", "7 + 5 = ?", "12"), response) == reward


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
