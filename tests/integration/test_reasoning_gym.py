"""Data sets of the package reasoning_gym: made and scored as the package does, by workers that end in time."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bapo.policy.tokenizer import character_tokenizer, check_alphabet
from bapo.tasks import reasoning_gym as module
from bapo.tasks.pool import close_workers
from bapo.tasks.reasoning_gym import ALPHABET, EOS, RUNS_ANSWERS, ReasoningGym
from bapo.types import Prompt

package = pytest.importorskip("reasoning_gym")

SUMS = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}


@pytest.fixture(scope="module", autouse=True)
def no_worker_is_left() -> Iterator[None]:
    yield
    close_workers()


def tiny(dataset: str = "chain_sum", **fields: Any) -> ReasoningGym:
    return ReasoningGym(dataset, **{"train_size": 40, "test_size": 10} | fields)


def original(task: ReasoningGym, split: str) -> Any:
    """The package's own data set that a split is taken from."""
    import json

    about = task._about(split)
    return package.create_dataset(about["dataset"], **json.loads(about["config"]))


@pytest.mark.parametrize(("dataset", "config"), [("chain_sum", SUMS), ("spell_backward", {}), ("color_cube_rotation", {})])
def test_prompts_are_the_generators(dataset: str, config: dict[str, Any]) -> None:
    task = tiny(dataset, config=config, instruction=" Go.")
    for split in ("train", "test"):
        made = original(task, split)
        prompts = task.prompts(split)  # type: ignore[arg-type]
        assert len(prompts) == {"train": 40, "test": 10}[split]
        for prompt in prompts:
            kind, name, part, index = prompt.uid.split("/")
            assert (kind, name, part) == ("reasoning_gym", dataset, split)
            entry = made[int(index)]
            assert (prompt.text, prompt.answer) == (entry["question"].strip() + " Go.", entry["answer"])


def test_no_test_question_is_in_train_though_the_space_is_small() -> None:
    task = tiny(config={"min_terms": 2, "max_terms": 2, "max_digits": 1}, train_size=300, test_size=40)
    train, test = task.prompts("train"), task.prompts("test")
    assert not {p.text for p in train} & {p.text for p in test}
    assert len({p.uid for p in (*train, *test)}) == 340
    shown = {text for text, _ in task.demonstrations(500, 0)}
    assert not shown & {p.text for p in test}
    with pytest.raises(ValueError, match=r"too few different questions; of 700, \d+ are not in a test split of 500, and"):
        tiny(config={"min_terms": 1, "max_terms": 1, "max_digits": 1}, train_size=100, test_size=500).prompts("train")


def test_splits_depend_on_the_seed_and_test_not_on_the_size_of_train() -> None:
    texts = [[p.text for p in tiny(config=SUMS, **fields).prompts("test")] for fields in ({}, {"train_size": 90}, {"seed": 1})]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.slow
@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_prompts_do_not_depend_on_the_hash_seed(hash_seed: str) -> None:
    """Those of ransom_note do, where they are made in the process itself."""
    source = (
        "from bapo.tasks.reasoning_gym import ReasoningGym as R; print([p.answer for p in R('ransom_note').prompts('test')])"
    )
    env = {"PYTHONHASHSEED": hash_seed, "PATH": "/usr/bin:/bin"}
    said = subprocess.run([sys.executable, "-c", source], env=env, capture_output=True, text=True, check=True).stdout
    assert said == f"{[p.answer for p in ReasoningGym('ransom_note').prompts('test')]}\n"


def test_scores_are_the_packages_own() -> None:
    task = tiny("letter_jumble")
    prompts, made = task.prompts("train")[:8], original(task, "train")
    said = [[p.answer, p.answer + " indeed", p.answer[1:], ""] for p in prompts]
    expected = [
        made.score_answer(answer or None, made[int(p.uid.rsplit("/", 1)[1])])
        for p, answers in zip(prompts, said, strict=True)
        for answer in answers
    ]
    got = task.verify([p for p in prompts for _ in range(4)], [f" {answer}\n" for answers in said for answer in answers])
    assert got == expected
    assert {0.0, 1.0} < set(got)  # parts of a point among them
    assert all(type(score) is float for score in got)


def test_what_is_scored_is_what_the_response_names() -> None:
    response = r"<answer>1</answer> no, \boxed{2} and \boxed{3}; <answer>4<answer> 5 </answer> </answer"
    said = [tiny(answer_in=where).answer(response) for where in ("response", "box", "tag")]  # type: ignore[arg-type]
    assert said == [response, "3", "5"]
    assert [tiny(answer_in=where).answer("</answer> 7 <answer>") for where in ("box", "tag")] == [None, None]  # type: ignore[arg-type]
    assert tiny().answer(" \n") is None
    for where, right in (("response", "{}"), ("box", r"so \boxed{{{}}}"), ("tag", "so <answer>{}</answer>")):
        task = tiny(config=SUMS, answer_in=where)  # type: ignore[arg-type]
        (prompt, *_) = task.prompts("test")
        assert task.verify([prompt] * 3, [right.format(prompt.answer), right.format("-1000"), ""]) == [1.0, 0.0, 0.0]


def test_a_scorer_that_runs_for_ever_exits_or_fails_verifies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.LIMITS["score"], "timeout_s", 1.0)
    task = tiny("string_insertion", allow_eval=True)
    prompts = task.prompts("test")[:4]
    start = time.perf_counter()
    got = task.verify(prompts, ["[9**9**9**9]", "exit()", "[x", prompts[3].answer])
    assert got[:2] == [None, None]
    assert got[3] == 1.0
    assert time.perf_counter() - start < 30


def test_a_scorer_that_raises_or_gives_no_number_verifies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = {"a": {"raised": "ValueError"}, "b": {"score": float("nan")}, "c": {"score": 0.5}, "d": {"gave_up": "late"}}

    class Replies:
        def ask_all(self, questions: list[Any]) -> list[dict[str, Any]]:
            asked.extend(questions)
            return [replies[question["answer"]] for question in questions]

    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(module, "_pool", Replies)
    prompt = Prompt("reasoning_gym/chain_sum/test/3", "q", "1")
    assert tiny().verify([prompt] * 5, ["a", "b", "c", "d", "c"]) == [None, None, 0.5, None, 0.5]
    assert len(asked) == 4  # equal ones once
    assert {question["index"] for question in asked} == {3}


def test_demonstrations_are_poor_and_can_be_read() -> None:
    task = tiny(config=SUMS, train_size=2000)
    pairs = task.demonstrations(2000, 3)
    made = original(task, "demonstrations")
    answers = {made[index]["question"].strip(): made[index]["answer"] for index in range(len(made))}
    right = sum(answers[text] == said for text, said in pairs) / len(pairs)
    assert right == pytest.approx(module.RIGHT, abs=0.05)
    assert all(len(answers[text]) == len(said) for text, said in pairs)  # a digit is another one
    assert pairs == task.demonstrations(2000, 3) != task.demonstrations(2000, 4)
    assert len(tiny(config=SUMS).demonstrations(100, 0)) == 100  # more than there are different questions
    assert EOS not in ALPHABET
    check_alphabet(character_tokenizer(task.alphabet, task.eos), "".join(text + said for text, said in pairs))
    assert len(task.alphabet) == 96


def test_a_data_set_without_answers_can_be_asked_but_not_shown() -> None:
    task = tiny("propositional_logic", train_size=4, test_size=2)
    assert [p.answer for p in task.prompts("test")] == ["", ""]
    with pytest.raises(ValueError, match=r"task.dataset is 'propositional_logic', which has no answers to show"):
        task.demonstrations(4, 0)
    with pytest.raises(ValueError, match=r"task.answer_in is 'box'; demonstrations are answers and nothing else"):
        tiny(answer_in="box").demonstrations(4, 0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"train_size": 0}, r"task.train_size is 0; it must be in \[1, "),
        ({"test_size": 0}, r"task.test_size is 0; it must be in \[1, "),
        ({"answer_in": "all"}, "task.answer_in is 'all'; it must be one of response, box, tag"),
        (
            {"config": {"seed": 1, "size": 2}},
            "task.config has seed, size; task.seed, task.train_size and task.test_size",
        ),
        ({"dataset": "n_queens"}, "task.dataset is 'n_queens', whose scorer runs what the model writes as Python"),
    ],
)
def test_what_cannot_be_is_refused_at_once(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny(**fields)


def test_what_the_package_refuses_is_said() -> None:
    for fields, message in (
        (
            {"dataset": "chain_sm"},
            "task.dataset is 'chain_sm' with task.config {}: reasoning_gym has no data set of that name; nearest: chain_sum",
        ),
        ({"config": {"max_trms": 3}}, "task.config {'max_trms': 3}: TypeError: .*unexpected keyword argument 'max_trms'"),
        ({"config": {"max_terms": 1}}, "AssertionError: max_terms must be >= min_terms"),
    ):
        with pytest.raises(ValueError, match=message):
            tiny(**fields).prompts("test")
    with pytest.raises(ValueError, match="split is 'dev'"):
        tiny().prompts("dev")  # type: ignore[arg-type]


def test_without_the_package_its_name_and_version_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs the package reasoning_gym: pip install reasoning_gym==") as refused:
        tiny()
    assert str(refused.value).endswith(f"=={importlib.metadata.version('reasoning_gym')}")


def test_the_trainer_does_not_import_the_package() -> None:
    source = "import sys, bapo.tasks.reasoning_gym as r; r.ReasoningGym('chain_sum'); print('reasoning_gym' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout == "False\n"


def test_every_scorer_that_runs_an_answer_is_known() -> None:
    """Read from the package's source: calls of eval or parse_expr on what is given to `score_answer`."""
    found = set()
    for dataset, (kind, _) in package.factory.DATASETS.items():
        path = Path(sys.modules[kind.__module__].__file__ or "")
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and function.name == "score_answer":
                calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
                names = {getattr(call.func, "id", getattr(call.func, "attr", "")): call for call in calls}
                runs = names.keys() & {"eval", "exec", "parse_expr", "sympify"}
                if any("entry" not in ast.unparse(names[name]) for name in runs) or "parse_expr" in runs:
                    found.add(dataset)
    assert found == RUNS_ANSWERS
