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
from support import task_files
from support.task_files import jsonl, parquet

from bapo.sft.warm_start import WarmStart
from bapo.tasks.aime24 import aime24
from bapo.tasks.aime25 import aime25
from bapo.tasks.files import files
from bapo.tasks.gsm8k import gsm8k
from bapo.tasks.math500 import math500
from bapo.tasks.problems import BOXED, Problems
from bapo.tasks.skywork import skywork
from bapo.tasks.verl_format import verl_format

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


def asked(task: Problems, split: str) -> list[tuple[str, str, str]]:
    """(uid, question without the instruction, gold) of each prompt."""
    prompts = task.prompts(split)  # type: ignore[arg-type]
    assert all(prompt.text.endswith(task.instruction) for prompt in prompts)
    return [(p.uid, p.text.removesuffix(task.instruction), p.answer) for p in prompts]


# Where rows come from.


def test_gsm8k_rows_become_prompts(tmp_path: Path) -> None:
    task = gsm8k(folder(tmp_path, task_files.GSM8K))
    assert asked(task, "train") == [
        ("gsm8k/train/0", task_files.GSM8K[0]["question"], "72"),
        ("gsm8k/train/1", "A house costs 80,000 and 40,000 more?", "1120000"),
        ("gsm8k/train/2", "How cold is it?", "-5.50"),
    ]
    assert task.instruction == BOXED
    assert BOXED.endswith("put your final answer within \\boxed{}.")
    assert [p.uid for p in gsm8k(task.path, test_size=1).prompts("test")] == ["gsm8k/test/0"]
    assert task.prompts("train") is task.prompts("train")  # read once
    assert gsm8k(task.path, instruction=" Go.").prompts("test")[2].text == "How cold is it? Go."


def test_math500_and_aime_rows_become_prompts(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "math.jsonl", task_files.MATH500)
    polar = "\\left( 3, \\frac{\\pi}{2} \\right)"
    assert asked(math500(str(file)), "test")[0] == ("math500/test/0", "Convert $(0,3)$ to polar coordinates.", polar)
    file = jsonl(tmp_path / "a" / "train.jsonl", task_files.AIME24)
    for path in (file, file.parent):  # its split is called train
        assert [gold for *_, gold in asked(aime24(str(path)), "test")] == ["204", "025"]
    file = parquet(tmp_path / "b" / "data" / "test-00000-of-00001.parquet", task_files.AIME25)
    assert asked(aime25(str(tmp_path / "b")), "test")[1] == ("aime25/test/1", "What is $6 \\cdot 8$?", "48")
    renamed = jsonl(tmp_path / "c.jsonl", [{"question": "opencompass", "answer": "70"}])
    assert asked(aime25(str(renamed), question="question"), "test") == [("aime25/test/0", "opencompass", "70")]


def test_a_split_that_a_task_has_not_is_named(tmp_path: Path) -> None:
    for task, split, has in (
        (math500(), "train", "the task math500 has only 'test'"),
        (aime24(), "train", "the task aime24 has only 'test'"),
        (aime25(), "train", "the task aime25 has only 'test'"),
        (skywork(), "test", "the task skywork has only 'train'"),
        (files(train=str(jsonl(tmp_path / "a.jsonl", [QA]))), "test", "the task files has only 'train'"),
    ):
        with pytest.raises(ValueError, match=f"split is '{split}'; {has}"):
            task.prompts(split)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="split is 'dev'; it must be 'train' or 'test'"):
        gsm8k().prompts("dev")  # type: ignore[arg-type]


def test_the_configs_of_a_readme_are_read(tmp_path: Path) -> None:
    """As a snapshot of the hub lies on disk."""
    for config, answer in (("main", "1"), ("socratic", "2")):
        rows = [{"question": "q", "answer": f"#### {answer}"}]
        parquet(tmp_path / "snapshot" / config / "test-00000-of-00001.parquet", rows)
    paths = "".join(f"- config_name: {c}\n  data_files:\n  - split: test\n    path: {c}/test-*\n" for c in ("main", "socratic"))
    (tmp_path / "snapshot" / "README.md").write_text(f"---\nconfigs:\n{paths}---\n")
    for config, answer in (("main", "1"), ("socratic", "2")):
        assert [p.answer for p in gsm8k(str(tmp_path / "snapshot"), name=config).prompts("test")] == [answer]


@pytest.mark.parametrize("write", [jsonl, parquet], ids=["jsonl", "parquet"])
def test_files_of_ones_own(write: Callable[..., Path], tmp_path: Path) -> None:
    rows = [{"id": "a", "ask": "one?", "gold": 1}, {"id": "b", "ask": "two?", "gold": 2}]
    train = write(tmp_path / f"rows.{write.__name__}", rows)
    task = files(train=str(train), question="ask", answer="gold", uid="id", mode="exact", instruction="")
    assert asked(task, "train") == [("files/train/a", "one?", "1"), ("files/train/b", "two?", "2")]
    assert task.path == str(train)
    by_index = files(test=str(train), question="ask", answer="gold")
    assert [uid for uid, *_ in asked(by_index, "test")] == ["files/test/0", "files/test/1"]
    twice = str(write(tmp_path / f"twice.{write.__name__}", [rows[0]] * 2))
    with pytest.raises(ValueError, match=r"has uids more than once, among them files/train/a"):
        files(train=twice, question="ask", answer="gold", uid="id").prompts("train")


def test_whole_numbers_with_a_gap_among_them_stay_whole(tmp_path: Path) -> None:
    rows = [{"question": "q", "answer": 25}, {"question": "q", "answer": None}]
    task = files(test=str(parquet(tmp_path / "a.parquet", [{**row, "answer": float(row["answer"] or "nan")} for row in rows])),
                 mode="integer", bad_rows="skip")  # fmt: skip
    assert [gold for *_, gold in asked(task, "test")] == ["25"]


def test_skywork_keeps_what_a_model_finds_neither_trivial_nor_impossible(tmp_path: Path) -> None:
    rows = [task_files.skywork(f"q{wrong}", f'["{wrong}"]', wrong, wrong) for wrong in (0, 1, 8, 15, 16)]
    rows[2]["prompt"][0]["content"] = "  What is $8$?\n"
    path = str(parquet(tmp_path / "math.parquet", rows))

    def golds(**options: Any) -> list[str]:
        return [gold for *_, gold in asked(skywork(path, **options), "train")]

    assert asked(skywork(path), "train")[2] == ("skywork/train/2", "What is $8$?", "8")
    assert golds() == ["0", "1", "8", "15", "16"]
    assert golds(difficulty_model="DeepSeek-R1-Distill-Qwen-7B") == ["1", "8", "15"]
    assert golds(difficulty_model="DeepSeek-R1-Distill-Qwen-1.5B") == ["0", "1", "8"]  # 2, 3, 10, 16, 16 wrong attempts
    assert golds(difficulty_model="DeepSeek-R1-Distill-Qwen-7B", min_difficulty=8, max_difficulty=16) == ["8", "15", "16"]
    assert golds(difficulty_model="DeepSeek-R1-Distill-Qwen-7B", train_size=2) == ["1", "8"]  # of those that are kept
    kept = skywork(path, difficulty_model="DeepSeek-R1-Distill-Qwen-7B").prompts("train")
    assert [p.uid for p in kept] == [f"skywork/train/{row}" for row in (1, 2, 3)]  # the rows keep their numbers
    with pytest.raises(ValueError, match="has no rows that the task keeps"):
        golds(difficulty_model="DeepSeek-R1-Distill-Qwen-32B")
    for options, message in (
        ({"min_difficulty": -1}, r"task.min_difficulty is -1; it must be in \[0, 16\]"),
        ({"max_difficulty": 17}, r"task.max_difficulty is 17; it must be in \[0, 16\]"),
        ({"min_difficulty": 9, "max_difficulty": 8}, "task.min_difficulty is 9; it must be <= 8"),
    ):
        with pytest.raises(ValueError, match=message):
            skywork(path, **options)


def test_skywork_wants_one_answer(tmp_path: Path) -> None:
    truths = ['["1"]', '["1", "2"]', "[]", "1", '"1"', "{broken", '[""]', '["\\\\sqrt{"]']
    path = str(parquet(tmp_path / "math.parquet", [task_files.skywork("q", truth) for truth in truths]))
    assert len(skywork(path).prompts("train")) == 1
    with pytest.raises(ValueError) as refused:  # noqa: PT011  the message is what counts
        skywork(path, bad_rows="refuse").prompts("train")
    assert "5 whose reward_model.ground_truth is no list of one answer: 1, 2, 3, 4, 5" in str(refused.value)
    assert "1 without an answer: 6; 1 whose answer does not parse: 7" in str(refused.value)


def test_verl_rows_become_prompts(tmp_path: Path) -> None:
    chat = (("system", "Be brief."), ("user", "1?"), ("assistant", "1"))
    rows = [task_files.verl("What is 2?", "2"), task_files.verl("And 3?", "3", *chat)]
    path = str(parquet(tmp_path / "train.parquet", rows))
    assert asked(verl_format(train=path, other_turns="drop"), "train")[1] == ("verl_format/train/1", "And 3?", "3")
    with pytest.raises(ValueError, match=r"1 of 2: 1 with turns besides a user turn \(rollout.* drops them\): 1; task.bad"):
        verl_format(train=path).prompts("train")
    assert [p.text for p in verl_format(train=path, bad_rows="skip").prompts("train")] == ["What is 2?"]  # no instruction
    bad = [{**rows[0], "prompt": [{"role": "system", "content": "s"}]}, {**rows[0], "reward_model": {"style": "rule"}}, rows[0]]
    with pytest.raises(ValueError, match=r"1 without a user turn: 0; 1 without a reward_model.ground_truth: 1; task"):
        verl_format(test=str(parquet(tmp_path / "bad.parquet", bad))).prompts("test")
    with pytest.raises(ValueError, match=r"task\.other_turns is 'keep'; it must be one of refuse, drop"):
        verl_format(train=path, other_turns="keep")  # type: ignore[arg-type]


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
        files(train=path).prompts("train")
    assert str(refused.value) == said + "; task.bad_rows=skip leaves them out"
    task = files(train=path, bad_rows="skip")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert [p.uid for p in task.prompts("train")] == ["files/train/0", "files/train/6"]
    said_once = [record.getMessage() for record in caplog.records if record.name == "bapo.tasks.problems"]
    assert said_once == [f"{said}; they are left out"]
    assert len(files(train=path, train_size=1).prompts("train")) == 1  # rows that are not asked for do not matter
    assert len(files(train=path, mode="exact", bad_rows="skip").prompts("train")) == 3  # \sqrt{ is a text
    wide = str(jsonl(tmp_path / "wide.jsonl", [*[QA] * 5, {**QA, "answer": "1000"}, {**QA, "answer": "-1"}]))
    with pytest.raises(ValueError, match=r"2 of 7: 2 whose answer is not a whole number from 0 to 999: 5, 6; task"):
        files(train=wide, mode="integer").prompts("train")


def test_ten_of_a_kind_are_named_and_nothing_good_is_refused_even_if_bad_rows_may_be_skipped(tmp_path: Path) -> None:
    path = str(jsonl(tmp_path / "rows.jsonl", BAD[1:2] * 12))
    with pytest.raises(ValueError, match=r"12 of 12: 12 without a question: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, \.\.\.$"):
        files(train=path, bad_rows="skip").prompts("train")


def test_gsm8k_rows_without_a_number_are_bad(tmp_path: Path) -> None:
    bad = [{"question": "q", "answer": "72"}, {"question": "q", "answer": "#### seven"}, {"question": "q", "answer": None}]
    with pytest.raises(ValueError, match=r"3 of 5: 2 without a number after '####': 1, 2; 1 without an answer: 3;"):
        gsm8k(folder(tmp_path, [task_files.GSM8K[0], *bad, task_files.GSM8K[1]])).prompts("train")


def test_equal_questions_stay_two_prompts(tmp_path: Path) -> None:
    prompts = files(train=str(jsonl(tmp_path / "rows.jsonl", [QA, QA]))).prompts("train")
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
        (gsm8k("openai/gsm8k"), "train", "task.path is 'openai/gsm8k'; split 'train' could not be loaded: ConnectionError"),
        (gsm8k(str(tmp_path / "none")), "train", "could not be loaded: FileNotFoundError"),
        (gsm8k(str(tmp_path / "empty")), "train", f"{wanted}train.jsonl, train.json, train.parquet, train-*.parquet"),
        (gsm8k(local), "test", f"split 'test' could not be loaded: FileNotFoundError: {wanted}test.jsonl"),
        (math500(str(tmp_path / "rows.csv")), "test", wanted),
        (math500(str(tmp_path / "broken.parquet")), "test", "split 'test' could not be loaded: "),
        (gsm8k(local, train_size=4), "train", "task.train_size is 4; it must be <= 3, the rows of"),
        (gsm8k(other), "test", "has no column question (it has problem, answer)"),
    ):
        with pytest.raises(ValueError) as refused:  # noqa: PT011  the message is what counts
            task.prompts(split)  # type: ignore[arg-type]
        assert message in str(refused.value)
        assert len(str(refused.value).splitlines()) == 1


def test_what_cannot_be_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    file = str(jsonl(tmp_path / "rows.jsonl", [QA]))
    for call, message in (
        (lambda: gsm8k(train_size=0), "task.train_size is 0; it must be >= 1, or null"),
        (lambda: gsm8k(test_size=0), "task.test_size is 0; it must be >= 1, or null"),
        (lambda: gsm8k(file), "name the folder that holds a file for each split"),
        (lambda: math500(bad_rows="drop"), "task.bad_rows is 'drop'; it must be one of refuse, skip"),  # type: ignore[arg-type]
        (lambda: files(), "task.train and task.test are null; at least one of them must be a file"),
        (lambda: files(test=str(tmp_path)), "task.test is .*; it must be a file: .jsonl, .json, .parquet"),
        (lambda: files(train=file, mode="maths"), "task.mode is 'maths'; it must be one of math, exact, integer"),  # type: ignore[arg-type]
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
        gsm8k(str(where)).prompts("train")
    assert not sentinel.exists()
    assert given.get("trust_remote_code", False) is False
    assert snapshot == bool(given)


def test_a_task_without_demonstrations_wants_a_model_of_its_own(tmp_path: Path) -> None:
    start = WarmStart(cache_dir=str(tmp_path))
    for call in (start, start.config):
        with pytest.raises(ValueError, match=r"task is gsm8k, which has no demonstrations .*: choose a model"):
            call(gsm8k())  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_the_library_is_the_pinned_one() -> None:
    pins = (Path(__file__).parents[2] / "requirements.txt").read_text()
    assert f"datasets=={importlib.metadata.version('datasets')} " in pins


@pytest.mark.skipif("BAPO_TEST_HUB" not in os.environ, reason="reads from the hub: BAPO_TEST_HUB=1 HF_HUB_OFFLINE=0")
@pytest.mark.parametrize("name", ["gsm8k", "math500", "aime24", "aime25", "skywork"])
def test_the_hub_has_what_conf_names(name: str) -> None:
    from hydra import compose, initialize_config_dir
    from hydra.utils import instantiate

    with initialize_config_dir(str(Path(__file__).parents[2] / "conf"), version_base="1.3"):
        task = instantiate(compose(f"task/{name}").task)
    split = "train" if name == "skywork" else "test"
    expected = {"gsm8k": 1319, "math500": 500, "aime24": 30, "aime25": 30}
    assert expected.get(name, 1) <= len(task.prompts(split))


def test_the_example_of_the_page_is_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hydra.utils import instantiate

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
        assert [p.answer for p in files(train=str(path)).prompts("train")] == [gold]


def test_a_missing_part_of_a_split_is_noticed(tmp_path: Path) -> None:
    parquet(tmp_path / "test-00000-of-00002.parquet", task_files.MATH500)
    with pytest.raises(ValueError, match=r"it must have 2 files like test-00000-of-00002.parquet; it has 1"):
        math500(path=str(tmp_path)).prompts("test")
    parquet(tmp_path / "test-00001-of-00002.parquet", task_files.MATH500)
    assert len(math500(path=str(tmp_path)).prompts("test")) == 4


def test_a_number_that_cannot_be_read_exactly_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "q", "answer": 123456789012345678901234567890}\n')
    with pytest.raises(ValueError, match=r"too large a number to be read exactly"):
        files(train=str(path)).prompts("train")
    path.write_text('{"question": "q", "answer": 9007199254740993}\n{"question": "q", "answer": 7}\n')
    assert [p.answer for p in files(train=str(path)).prompts("train")] == ["9007199254740993", "7"]
