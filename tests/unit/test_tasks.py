"""Tasks on data sets: what is read, what is asked, what is refused."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from support import task_files
from support.task_files import jsonl, parquet
from support.tasks import dataset

from bapo.sft.warm_start import WarmStart
from bapo.tasks.dataset import INSTRUCTIONS, DatasetTask
from bapo.training.cli import CONF

QA = {"question": "q", "answer": "1"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the library keeps of the files it has read stays inside the test."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf_datasets")


def folder(where: Path, rows: list[dict[str, Any]], splits: tuple[str, ...] = ("train", "test")) -> str:
    """A local data set: one JSONL file per split."""
    for split in splits:
        jsonl(where / "data" / f"{split}.jsonl", rows)
    return str(where / "data")


def questions(task: DatasetTask, split: str) -> list[tuple[str, str, str]]:
    """(uid, question without the instruction, gold) of each prompt."""
    prompts = task.prompts(split)  # type: ignore[arg-type]
    instruction = INSTRUCTIONS[task.answer_in] if task.instruction is None else task.instruction
    assert all(prompt.text.endswith(instruction) for prompt in prompts)
    return [(p.uid, p.text.removesuffix(instruction), p.answer) for p in prompts]


# Where rows come from.


def test_gsm8k_rows_become_prompts(tmp_path: Path) -> None:
    task = dataset("gsm8k", path=folder(tmp_path, task_files.GSM8K))
    assert questions(task, "train") == [
        ("gsm8k/train/0", task_files.GSM8K[0]["question"], "72"),
        ("gsm8k/train/1", "A house costs 80,000 and 40,000 more?", "1120000"),
        ("gsm8k/train/2", "How cold is it?", "-5.50"),
    ]
    assert INSTRUCTIONS["box"].endswith("put your final answer within \\boxed{}.")
    assert [p.uid for p in dataset("gsm8k", path=task.path, test_size=1).prompts("test")] == ["gsm8k/test/0"]
    assert task.prompts("train") is task.prompts("train")  # read once
    assert dataset("gsm8k", path=task.path, instruction=" Go.").prompts("test")[2].text == "How cold is it? Go."


def test_math500_and_aime_rows_become_prompts(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "math.jsonl", task_files.MATH500)
    polar = "\\left( 3, \\frac{\\pi}{2} \\right)"
    assert questions(dataset("math500", path=str(file)), "test")[0] == (
        "math500/test/0",
        "Convert $(0,3)$ to polar coordinates.",
        polar,
    )
    file = jsonl(tmp_path / "a" / "train.jsonl", task_files.AIME24)
    for path in (file, file.parent):  # its split is called train
        assert [gold for *_, gold in questions(dataset("aime24", path=str(path)), "test")] == ["204", "025"]
    file = parquet(tmp_path / "b" / "data" / "test-00000-of-00001.parquet", task_files.AIME25)
    assert questions(dataset("aime25", path=str(tmp_path / "b")), "test")[1] == ("aime25/test/1", "What is $6 \\cdot 8$?", "48")
    renamed = jsonl(tmp_path / "c.jsonl", [{"question": "opencompass", "answer": "70"}])
    assert questions(dataset("aime25", path=str(renamed), question_column="question"), "test") == [
        ("aime25/test/0", "opencompass", "70")
    ]


def test_a_data_set_is_a_yaml_file_and_no_python(tmp_path: Path) -> None:
    """Beside the run, with nested columns and a solution that ends in the answer."""
    rows = [{"item": {"ask": "one?", "why": "so\n#### $1.50$"}, "key": "k"}]
    path = jsonl(tmp_path / "data" / "dev.jsonl", rows)
    (tmp_path / "conf" / "task").mkdir(parents=True)
    (tmp_path / "conf" / "task" / "mine.yaml").write_text(
        f"defaults: [_dataset, _self_]\nname: mine\npath: {path.parent}\ntrain: dev\nquestion_column: item.ask\n"
        "answer_column: item.why\nanswer_format: hashes\nuid_column: key\nmode: number\ninstruction: ' Go.'\n"
    )
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("train", overrides=["task=mine", f"hydra.searchpath=[file://{tmp_path / 'conf'}]"])
    task = instantiate(cfg.task)
    assert questions(task, "train") == [("mine/train/k", "one?", "$1.50$")]
    assert task.verify(task.prompts("train"), [r"\boxed{1.5}"]) == [1.0]


def test_a_split_that_a_task_has_not_is_named(tmp_path: Path) -> None:
    for task, split, has in (
        (dataset("math500"), "train", "the task math500 has only 'test'"),
        (dataset("aime24"), "train", "the task aime24 has only 'test'"),
        (dataset("aime25"), "train", "the task aime25 has only 'test'"),
        (dataset("skywork"), "test", "the task skywork has only 'train'"),
        (dataset("files", train=str(jsonl(tmp_path / "a.jsonl", [QA]))), "test", "the task files has only 'train'"),
    ):
        with pytest.raises(ValueError, match=f"split is '{split}'; {has}"):
            task.prompts(split)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="split is 'dev'; it must be 'train' or 'test'"):
        dataset("gsm8k").prompts("dev")  # type: ignore[arg-type]


def test_the_configs_of_a_readme_are_read(tmp_path: Path) -> None:
    """As a snapshot of the hub lies on disk."""
    for config, answer in (("main", "1"), ("socratic", "2")):
        rows = [{"question": "q", "answer": f"#### {answer}"}]
        parquet(tmp_path / "snapshot" / config / "test-00000-of-00001.parquet", rows)
    paths = "".join(f"- config_name: {c}\n  data_files:\n  - split: test\n    path: {c}/test-*\n" for c in ("main", "socratic"))
    (tmp_path / "snapshot" / "README.md").write_text(f"---\nconfigs:\n{paths}---\n")
    for config, answer in (("main", "1"), ("socratic", "2")):
        assert [p.answer for p in dataset("gsm8k", path=str(tmp_path / "snapshot"), config=config).prompts("test")] == [answer]


@pytest.mark.parametrize("write", [jsonl, parquet], ids=["jsonl", "parquet"])
def test_files_of_ones_own(write: Callable[..., Path], tmp_path: Path) -> None:
    rows = [{"id": "a", "ask": "one?", "gold": 1}, {"id": "b", "ask": "two?", "gold": 2}]
    train = write(tmp_path / f"rows.{write.__name__}", rows)
    task = dataset(
        "files", train=str(train), question_column="ask", answer_column="gold", uid_column="id", mode="exact", instruction=""
    )
    assert questions(task, "train") == [("files/train/a", "one?", "1"), ("files/train/b", "two?", "2")]
    assert task.source == (str(train), None)
    by_index = dataset("files", test=str(train), question_column="ask", answer_column="gold")
    assert [uid for uid, *_ in questions(by_index, "test")] == ["files/test/0", "files/test/1"]
    twice = str(write(tmp_path / f"twice.{write.__name__}", [rows[0]] * 2))
    with pytest.raises(ValueError, match=r"has uids more than once, among them files/train/a"):
        dataset("files", train=twice, question_column="ask", answer_column="gold", uid_column="id").prompts("train")


def test_whole_numbers_with_a_gap_among_them_stay_whole(tmp_path: Path) -> None:
    file = parquet(tmp_path / "a.parquet", [{"question": "q", "answer": answer} for answer in (25.0, float("nan"))])
    task = dataset("files", test=str(file), mode="integer", bad_rows="skip")
    assert [gold for *_, gold in questions(task, "test")] == ["25"]


def test_skywork_keeps_what_a_model_finds_neither_trivial_nor_impossible(tmp_path: Path) -> None:
    rows = [task_files.skywork(f"q{wrong}", f'["{wrong}"]', wrong, wrong) for wrong in (0, 1, 8, 15, 16)]
    rows[2]["prompt"][0]["content"] = "  What is $8$?\n"
    path = str(parquet(tmp_path / "math.parquet", rows))
    column = "extra_info.model_difficulty.DeepSeek-R1-Distill-Qwen-"  # with a dot in the last key: 1.5B

    def golds(**options: Any) -> list[str]:
        return [gold for *_, gold in questions(dataset("skywork", path=path, **options), "train")]

    assert questions(dataset("skywork", path=path), "train")[2] == ("skywork/train/2", "What is $8$?", "8")
    assert golds() == ["0", "1", "8", "15", "16"]
    assert golds(difficulty_column=column + "7B") == ["1", "8", "15"]
    assert golds(difficulty_column=column + "1.5B") == ["0", "1", "8"]  # 2, 3, 10, 16, 16 wrong attempts
    assert golds(difficulty_column=column + "7B", min_difficulty=8, max_difficulty=16) == ["8", "15", "16"]
    assert golds(difficulty_column=column + "7B", min_difficulty=None) == ["0", "1", "8", "15"]
    assert golds(difficulty_column=column + "7B", train_size=2) == ["1", "8"]  # of those that are kept
    kept = dataset("skywork", path=path, difficulty_column=column + "7B").prompts("train")
    assert [p.uid for p in kept] == [f"skywork/train/{row}" for row in (1, 2, 3)]  # the rows keep their numbers
    with pytest.raises(ValueError, match=r"has no row with a extra_info.*-32B in \[1, 15\]"):
        golds(difficulty_column=column + "32B")
    with pytest.raises(ValueError, match=r"has no row with a extra_info.*-3B in \[1, 15\]"):
        golds(difficulty_column=column + "3B")
    with pytest.raises(ValueError, match=r"has no column other \(it has "):
        golds(difficulty_column="other.field")
    with pytest.raises(ValueError, match=r"task\.min_difficulty is 9; it must be <= 8"):
        dataset("skywork", path=path, min_difficulty=9, max_difficulty=8)


def test_skywork_wants_one_answer(tmp_path: Path) -> None:
    truths = ['["1"]', '["1", "2"]', "[]", "1", '"1"', "{broken", '[""]', '["\\\\sqrt{"]']
    path = str(parquet(tmp_path / "math.parquet", [task_files.skywork("q", truth) for truth in truths]))
    assert len(dataset("skywork", path=path).prompts("train")) == 1
    with pytest.raises(ValueError) as refused:  # noqa: PT011  the message is what counts
        dataset("skywork", path=path, bad_rows="refuse").prompts("train")
    assert "5 whose reward_model.ground_truth is no list of one answer: 1, 2, 3, 4, 5" in str(refused.value)
    assert "1 without a reward_model.ground_truth: 6; 1 whose answer does not parse: 7" in str(refused.value)


def test_verl_rows_become_prompts(tmp_path: Path) -> None:
    chat = (("system", "Be brief."), ("user", "1?"), ("assistant", "1"))
    rows = [task_files.verl("What is 2?", "2"), task_files.verl("And 3?", "3", *chat)]
    path = str(parquet(tmp_path / "train.parquet", rows))
    assert questions(dataset("verl_format", train=path, other_turns="drop"), "train")[1] == (
        "verl_format/train/1",
        "And 3?",
        "3",
    )
    with pytest.raises(ValueError, match=r"1 of 2: 1 with turns besides a user turn \(rollout.* drops them\): 1; task.bad"):
        dataset("verl_format", train=path).prompts("train")
    assert [p.text for p in dataset("verl_format", train=path, bad_rows="skip").prompts("train")] == [
        "What is 2?"
    ]  # no instruction
    bad = [{**rows[0], "prompt": [{"role": "system", "content": "s"}]}, {**rows[0], "reward_model": {"style": "rule"}}, rows[0]]
    with pytest.raises(ValueError, match=r"1 without a user turn: 0; 1 without a reward_model.ground_truth: 1; task"):
        dataset("verl_format", test=str(parquet(tmp_path / "bad.parquet", bad))).prompts("test")
    with pytest.raises(ValueError, match=r"task\.other_turns is 'keep'; it must be one of refuse, drop"):
        dataset("verl_format", train=path, other_turns="keep")  # type: ignore[arg-type]


# Bad rows, and data that cannot be had.

BAD = [
    QA,
    {"question": "   ", "answer": "1"},
    {"question": None, "answer": "1"},
    {"question": "q", "answer": None},
    {"question": "q", "answer": "\\sqrt{"},
    {"question": "q", "answer": "x" * 1001},
    {"question": "q2", "answer": "2"},
]


def test_bad_rows_are_counted_by_kind_and_refused_or_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = str(jsonl(tmp_path / "rows.jsonl", BAD))
    said = (
        f"task.train is {path!r}; split 'train' has bad rows, 5 of 7: 2 without a question: 1, 2; 1 without an answer: 3; "
        "1 whose answer does not parse: 4; 1 whose answer is longer than 1000 characters: 5"
    )
    with pytest.raises(ValueError) as refused:  # noqa: PT011  the message is what counts
        dataset("files", train=path).prompts("train")
    assert str(refused.value) == said + "; task.bad_rows=skip leaves them out"
    task = dataset("files", train=path, bad_rows="skip")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert [p.uid for p in task.prompts("train")] == ["files/train/0", "files/train/6"]
    said_once = [record.getMessage() for record in caplog.records if record.name == "bapo.tasks.dataset"]
    assert said_once == [f"{said}; they are left out"]
    assert len(dataset("files", train=path, train_size=1).prompts("train")) == 1  # rows that are not asked for do not matter
    assert len(dataset("files", train=path, mode="exact", bad_rows="skip").prompts("train")) == 3  # \sqrt{ is a text
    wide = str(jsonl(tmp_path / "wide.jsonl", [*[QA] * 5, {**QA, "answer": "1000"}, {**QA, "answer": "-1"}]))
    with pytest.raises(ValueError, match=r"2 of 7: 2 whose answer is not a whole number from 0 to 999: 5, 6; task"):
        dataset("files", train=wide, mode="integer").prompts("train")


def test_ten_of_a_kind_are_named_and_nothing_good_is_refused_even_if_bad_rows_may_be_skipped(tmp_path: Path) -> None:
    path = str(jsonl(tmp_path / "rows.jsonl", BAD[1:2] * 12))
    with pytest.raises(ValueError, match=r"12 of 12: 12 without a question: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, \.\.\.$"):
        dataset("files", train=path, bad_rows="skip").prompts("train")


def test_gsm8k_rows_without_a_number_are_bad(tmp_path: Path) -> None:
    bad = [{"question": "q", "answer": "72"}, {"question": "q", "answer": "#### seven"}, {"question": "q", "answer": None}]
    with pytest.raises(
        ValueError,
        match=r"3 of 5: 1 without an answer after '####': 1; 1 whose answer is not a number: 2; 1 without an answer: 3;",
    ):
        dataset("gsm8k", path=folder(tmp_path, [task_files.GSM8K[0], *bad, task_files.GSM8K[1]])).prompts("train")


def test_equal_questions_stay_two_prompts(tmp_path: Path) -> None:
    prompts = dataset("files", train=str(jsonl(tmp_path / "rows.jsonl", [QA, QA]))).prompts("train")
    assert prompts[0].text == prompts[1].text
    assert [p.uid for p in prompts] == ["files/train/0", "files/train/1"]


def test_data_that_cannot_be_had_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "rows.csv").write_text("question,answer\n")
    (tmp_path / "broken.parquet").write_text("none")
    local = folder(tmp_path, task_files.GSM8K, ("train",))
    other = folder(tmp_path / "other", [{"problem": "q", "answer": "#### 1"}])
    wanted = "it must be a file (.jsonl, .json, .parquet), or a folder with one of "
    for task, split, message in (
        (
            dataset("gsm8k", path="openai/gsm8k"),
            "train",
            "task.path is 'openai/gsm8k'; split 'train' could not be loaded: ConnectionError",
        ),
        (dataset("gsm8k", path=str(tmp_path / "none")), "train", "could not be loaded: FileNotFoundError"),
        (
            dataset("gsm8k", path=str(tmp_path / "empty")),
            "train",
            f"{wanted}train.jsonl, train.json, train.parquet, train-*.parquet",
        ),
        (dataset("gsm8k", path=local), "test", f"split 'test' could not be loaded: FileNotFoundError: {wanted}test.jsonl"),
        (dataset("math500", path=str(tmp_path / "rows.csv")), "test", wanted),
        (dataset("math500", path=str(tmp_path / "broken.parquet")), "test", "split 'test' could not be loaded: "),
        (dataset("gsm8k", path=local, train_size=4), "train", "task.train_size is 4; it must be <= 3, the rows of"),
        (dataset("gsm8k", path=other), "test", "has no column question (it has problem, answer)"),
    ):
        with pytest.raises(ValueError) as refused:  # noqa: PT011  the message is what counts
            task.prompts(split)  # type: ignore[arg-type]
        assert message in str(refused.value)
        assert len(str(refused.value).splitlines()) == 1


def test_what_cannot_be_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    file = str(jsonl(tmp_path / "rows.jsonl", [QA]))
    for call, message in (
        (lambda: dataset("gsm8k", train_size=0), "task.train_size is 0; it must be >= 1, or null"),
        (lambda: dataset("gsm8k", test_size=0), "task.test_size is 0; it must be >= 1, or null"),
        (lambda: dataset("gsm8k", path=file), "name the folder that holds a file for each split"),
        (lambda: dataset("math500", bad_rows="drop"), "task.bad_rows is 'drop'; it must be one of refuse, skip"),
        (lambda: dataset("files"), "task.train and task.test are null; at least one of them must be a file"),
        (lambda: dataset("files", test=str(tmp_path)), "task.test is .*; it must be a file: .jsonl, .json, .parquet"),
        (
            lambda: dataset("files", train=file, mode="maths"),
            "task.mode is 'maths'; it must be one of math, exact, integer, n",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("snapshot", [False, True], ids=["plain", "snapshot"])
def test_a_data_set_with_code_of_its_own_is_refused_and_nothing_runs(
    snapshot: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    if snapshot:
        (where / "README.md").write_text("# data\n")
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ValueError, match="split 'train' could not be loaded"):
        dataset("gsm8k", path=str(where)).prompts("train")
    assert not sentinel.exists()
    assert given.get("trust_remote_code", False) is False
    assert snapshot == bool(given)


def test_a_task_without_demonstrations_wants_a_model_of_its_own(tmp_path: Path) -> None:
    start = WarmStart(cache_dir=str(tmp_path))
    for call in (start, start.config):
        with pytest.raises(ValueError, match=r"task is gsm8k, which has no demonstrations .*: choose a model"):
            call(dataset("gsm8k"))  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_the_library_is_the_pinned_one() -> None:
    pins = (Path(__file__).parents[2] / "requirements.txt").read_text()
    assert f"datasets=={importlib.metadata.version('datasets')} " in pins


@pytest.mark.skipif("BAPO_TEST_HUB" not in os.environ, reason="reads from the hub: BAPO_TEST_HUB=1 HF_HUB_OFFLINE=0")
@pytest.mark.parametrize("name", ["gsm8k", "math500", "aime24", "aime25", "skywork"])
def test_the_hub_has_what_conf_names(name: str) -> None:
    task = dataset(name)
    split = "train" if name == "skywork" else "test"
    expected = {"gsm8k": 1319, "math500": 500, "aime24": 30, "aime25": 30}
    assert expected.get(name, 1) <= len(task.prompts(split))


def test_the_example_of_the_page_is_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class Parity" in block]
    (tmp_path / "parity_of_the_page.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    task = instantiate({"_target_": "parity_of_the_page.Parity", "test_size": 3, "train_size": 2})
    assert [(p.uid, p.answer) for p in task.prompts("test")] == [("parity/0", "yes"), ("parity/1", "no"), ("parity/2", "yes")]
    assert [p.uid for p in task.prompts("train")] == ["parity/3", "parity/4"]
    assert task.verify(task.prompts("test"), [" Yes\n", "yes", ""]) == [1.0, 0.0, 0.0]
    assert [task.answer(said) for said in (" No ", " ")] == ["no", None]


def test_a_file_that_was_changed_is_read_again_whatever_its_time_says(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for gold in ("12", "21"):
        path.write_text(json.dumps({"question": "q", "answer": gold}) + "\n")
        os.utime(path, (10**9, 10**9))
        assert [p.answer for p in dataset("files", train=str(path)).prompts("train")] == [gold]


def test_a_missing_part_of_a_split_is_noticed(tmp_path: Path) -> None:
    parquet(tmp_path / "test-00000-of-00002.parquet", task_files.MATH500)
    with pytest.raises(ValueError, match=r"it must have 2 files like test-00000-of-00002.parquet; it has 1"):
        dataset("math500", path=str(tmp_path)).prompts("test")
    parquet(tmp_path / "test-00001-of-00002.parquet", task_files.MATH500)
    assert len(dataset("math500", path=str(tmp_path)).prompts("test")) == 4


def test_a_number_that_cannot_be_read_exactly_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "q", "answer": 123456789012345678901234567890}\n')
    with pytest.raises(ValueError, match=r"too large a number to be read exactly"):
        dataset("files", train=str(path)).prompts("train")
    path.write_text('{"question": "q", "answer": 9007199254740993}\n{"question": "q", "answer": 7}\n')
    assert [p.answer for p in dataset("files", train=str(path)).prompts("train")] == ["9007199254740993", "7"]
