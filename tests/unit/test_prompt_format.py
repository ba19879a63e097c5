"""From question to ids: one BOS, one function for training, evaluation and sync check, prompts that are too long."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import FixedPolicy, ScriptedEngine
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from bapo.advantages import GroupRelativeAdvantage
from bapo.data.datamodule import RolloutDataModule
from bapo.evaluation import evaluate
from bapo.evaluation.callback import Evaluate
from bapo.protocols import Task
from bapo.rollouts.collector import Collector
from bapo.rollouts.options import RolloutOptions
from bapo.rollouts.prompt_format import PLAIN, PromptFormat
from bapo.rollouts.ranks import Ranks
from bapo.rollouts.schedule import Schedule
from bapo.types import Prompt, SamplingParams

BOS, EOS, HELLO, WORLD, OPEN, CLOSE, SYSTEM, THINK = range(8)
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}sys {% endif %}{{ m.content }} {% endfor %}"
    "{% if enable_thinking is defined and enable_thinking %}think {% endif %}"
)
QUESTION = Prompt("q", "hello world", "1")


def words(adds_bos: bool = True, template: str | None = None) -> PreTrainedTokenizerFast:
    """A word-level tokenizer, with or without a BOS of its own."""
    vocabulary = {w: i for i, w in enumerate(["<s>", "</s>", "hello", "world", "[", "]", "sys", "think"])}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="]"))
    backend.pre_tokenizer = WhitespaceSplit()
    if adds_bos:
        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    made.chat_template = template
    return made


def test_the_tokenizer_would_double_the_bos_of_a_template() -> None:
    tokenizer = words(template="{{ bos_token }} " + TEMPLATE)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hello world"}], tokenize=False)
    assert tokenizer(text)["input_ids"] == [BOS, BOS, HELLO, WORLD]


@pytest.mark.parametrize(
    ("adds_bos", "template", "text", "expected"),
    [
        (True, None, "hello world", [BOS, HELLO, WORLD]),
        (True, None, "<s> hello world", [BOS, HELLO, WORLD]),
        (False, None, "hello world", [HELLO, WORLD]),
        (False, None, "<s> hello world", [BOS, HELLO, WORLD]),
        (False, None, "<s> <s> hello <s>", [BOS, HELLO, BOS]),
        (True, "{{ bos_token }} " + TEMPLATE, "hello world", [BOS, HELLO, WORLD]),
        (True, TEMPLATE, "hello world", [BOS, HELLO, WORLD]),
        (False, "{{ bos_token }} " + TEMPLATE, "hello world", [BOS, HELLO, WORLD]),
        (False, "{{ bos_token }} {{ bos_token }} " + TEMPLATE, "hello world", [BOS, HELLO, WORLD]),
        (False, TEMPLATE, "hello world", [HELLO, WORLD]),
    ],
)
def test_a_prompt_has_one_bos_or_none(adds_bos, template, text, expected) -> None:
    prompt_format = PromptFormat(kind="chat" if template else "plain")
    assert prompt_format.encode(words(adds_bos, template), Prompt("q", text, "")) == tuple(expected)


def test_a_turn_that_opens_with_the_bos_token_stays() -> None:
    """ChatML tokenizers call <|im_start|> their BOS: only a doubled one in front is a fault."""
    tokenizer = words(False, "{% for m in messages %}<s> {{ m.content }} {% endfor %}<s>")
    chat = PromptFormat(kind="chat", system="world")
    assert chat.encode(tokenizer, Prompt("q", "hello", "")) == (BOS, WORLD, BOS, HELLO, BOS)


def test_the_template_stands_around_the_question_and_braces_in_it_are_text() -> None:
    wrapped = PromptFormat(template="[ {text} ]")
    assert wrapped.encode(words(), QUESTION) == (BOS, OPEN, HELLO, WORLD, CLOSE)
    assert wrapped.encode(words(), Prompt("q", "{text} {0}", "")) == (BOS, OPEN, CLOSE, CLOSE, CLOSE)  # unknown words


def test_system_examples_and_thinking_reach_the_chat_template() -> None:
    tokenizer = words(template=TEMPLATE)
    say = lambda **fields: PromptFormat(kind="chat", **fields).encode(tokenizer, QUESTION)  # noqa: E731
    assert say(system="[") == (BOS, SYSTEM, OPEN, HELLO, WORLD)
    assert say(thinking=True) == (BOS, HELLO, WORLD, THINK)
    assert say(thinking=False) == say() == (BOS, HELLO, WORLD)
    assert say(examples=(("]", "["),), template="world {text}") == (BOS, WORLD, CLOSE, OPEN, WORLD, HELLO, WORLD)


def test_plain_text_of_the_character_tokenizer_is_its_characters(tokenizer) -> None:
    ids = PLAIN.encode(tokenizer, Prompt("q", "a12=", ""))
    assert ids == tuple(tokenizer.get_vocab()[c] for c in "a12=")


@pytest.mark.parametrize("adds_bos", [True, False])
def test_an_empty_question_is_refused(adds_bos) -> None:
    for prompt_format in (PLAIN, PromptFormat(template="[ {text}"), PromptFormat(kind="chat")):
        with pytest.raises(ValueError, match="prompt 'mute' has the text ''; it must hold at least one token"):
            prompt_format.encode(words(adds_bos, "[ {{ messages[0].content }}"), Prompt("mute", "", ""))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "chatt"}, "rollout.prompt.kind is 'chatt'; it must be one of plain, chat"),
        ({"system": "x"}, "rollout.prompt.system is 'x'; it goes with rollout.prompt.kind chat only"),
        ({"thinking": False}, "rollout.prompt.thinking is False; it goes with rollout.prompt.kind chat only"),
        ({"template": "no place"}, "rollout.prompt.template is 'no place'; it must hold {text}, the question, once"),
        ({"template": "{text}{text}"}, "it must hold {text}, the question, once"),
    ],
)
def test_a_format_that_cannot_be_is_refused(fields, message) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011  the message is compared whole
        PromptFormat(**fields)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("template", "fields", "message"),
    [
        (None, {}, "rollout.prompt.kind is 'chat'; the tokenizer of '' has no chat template"),
        ("{{ messages[0].content }}", {"thinking": True}, "rollout.prompt.thinking is True; the chat template of '' knows no"),
        (
            "{{ raise_exception('no system') }}",
            {"system": "x"},
            "rollout.prompt: the chat template of '' refuses it: no system",
        ),
    ],
)
def test_a_chat_that_the_tokenizer_cannot_hold_is_refused(template, fields, message) -> None:
    with pytest.raises(ValueError, match=message):
        PromptFormat(kind="chat", **fields).encode(words(template=template), QUESTION)


class Questions(Task):
    """`rows` in every split; "]" is right."""

    def __init__(self, *texts: str):
        self.rows = [Prompt(f"q{i}", text, "]") for i, text in enumerate(texts)]

    def prompts(self, split: str) -> list[Prompt]:
        return self.rows

    def verify(self, prompts: list[Prompt], responses: list[str]) -> list[float]:
        return [float(response == prompt.answer) for prompt, response in zip(prompts, responses, strict=True)]


def collector(engine, tokenizer, task, **options) -> Collector:
    fields = {"prompts_per_round": 1, "group_size": 2} | options
    rollout = RolloutOptions(engine=lambda: engine, sampling=SamplingParams(max_tokens=4), **fields)
    return Collector(engine, task, tokenizer, GroupRelativeAdvantage(), rollout, seed=0)


def answering() -> ScriptedEngine:
    engine = ScriptedEngine(lambda r: [CLOSE if r.sample_index else OPEN, EOS])
    engine.load_weights([], 0)
    return engine


def test_training_evaluation_and_sync_check_ask_with_the_same_ids(tmp_path: Path) -> None:
    tokenizer, engine = words(template="{{ bos_token }} " + TEMPLATE), answering()
    chat = PromptFormat(kind="chat", system="[", thinking=True)
    made = collector(engine, tokenizer, Questions("hello world"), prompt=chat)
    pool = made.collect(0, {}, FixedPolicy(0), 2, Ranks())
    evaluate(engine, made.task, tokenizer, made.prompts, SamplingParams(max_tokens=4), 1, 0, prompt_format=chat)
    data = RolloutDataModule(made, Schedule(1, 1), tmp_path, seed=0, sync_tolerance=2.0)
    data.connect(FixedPolicy(0))
    rows: list[dict[str, float]] = []
    trainer = SimpleNamespace(datamodule=data, global_rank=0, world_size=1)
    Evaluate(SamplingParams(max_tokens=4))._evaluate(trainer, SimpleNamespace(log_row=rows.append))
    right = (BOS, SYSTEM, OPEN, HELLO, WORLD, THINK)
    assert [request.uid for request in engine.requests] == ["q0@0", "q0@0", "q0", "sync", "q0"]
    assert {request.prompt_ids for request in engine.requests} == {right}
    assert pool.batch.input_ids[0].tolist() == [*right, OPEN, EOS]
    assert rows[0]["eval/test/avg@1"] == 0.0


def test_long_training_prompts_are_left_out_before_the_first_request_and_counted(caplog) -> None:
    """100 words of one question are too many for 50; with its template of four more, a question of 47 words is too."""
    tokenizer, engine = words(template="[ [ " + TEMPLATE + " ]"), answering()
    texts = ["hello " * n for n in (100, 46, 47, 60, 70, 1)]  # with [ [ ] and the BOS, 46 make 50
    with caplog.at_level(logging.WARNING):
        made = collector(engine, tokenizer, Questions(*texts), prompt=PromptFormat(kind="chat"), max_prompt_tokens=50)
    assert [prompt.uid for prompt in made.prompts] == ["q1", "q5"]
    (warning,) = caplog.messages
    assert warning == "4 of 6 training prompts are left out: longer than rollout.max_prompt_tokens=50 (q0, q2, q3, ...)"
    caplog.clear()
    collector(engine, tokenizer, Questions(*texts[1:2]), prompt=PromptFormat(kind="chat"), max_prompt_tokens=50)
    assert caplog.messages == []
    assert engine.calls == 0


def test_a_limit_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rollout.max_prompt_tokens is 2; it must be >= 3, the shortest training prompt"):
        collector(answering(), words(), Questions("hello world", "hello world hello"), max_prompt_tokens=2)
    with pytest.raises(ValueError, match=r"rollout.max_prompt_tokens is 0; it must be >= 1"):
        collector(answering(), words(), Questions("hello"), max_prompt_tokens=0)


def test_what_does_not_fit_the_model_is_refused_in_training_without_a_limit_and_in_evaluation_always() -> None:
    """Measured with everything around the question: a BOS, two brackets and ten words make 13."""
    engine, task, wrapped = answering(), Questions("hello", "hello " * 10), PromptFormat(template="[ {text} ]")
    engine.max_positions = 16
    with pytest.raises(ValueError, match=r"rollout.sampling.max_tokens is 4; it must be <= 3: .*longest prompt takes 13"):
        collector(engine, words(), task, prompt=wrapped)
    made = collector(engine, words(), task, prompt=wrapped, max_prompt_tokens=12)
    assert [prompt.uid for prompt in made.prompts] == ["q0"]
    with pytest.raises(ValueError, match=r"eval.max_tokens is 8; it must be <= 3: .*longest prompt takes 13"):
        made.check("test", task.prompts("test"), SamplingParams(max_tokens=8), "eval")
    assert engine.calls == 0
