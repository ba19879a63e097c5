"""From a question to the ids that a model reads: one function for training, evaluation and every other request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from bapo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLACE = "{text}"
"""The place of the question in `PromptFormat.template`."""


@dataclass(frozen=True)
class PromptFormat:
    """Turns a question into a prompt.

    kind: plain, the text alone; chat, a user's turn in the tokenizer's chat template, opened for the answer. template: text
    around the question, which replaces its `{text}`. What follows belongs to chat. system: text of a system turn before it.
    examples: questions and answers as turns before it. thinking: passed, unless None, to a chat template that knows
    `enable_thinking` (Qwen3).
    """

    kind: Literal["plain", "chat"] = "plain"
    system: str | None = None
    examples: tuple[tuple[str, str], ...] = ()
    thinking: bool | None = None
    template: str = PLACE

    def __post_init__(self) -> None:
        if self.kind not in ("plain", "chat"):
            raise ValueError(f"rollout.prompt.kind is {self.kind!r}; it must be one of plain, chat")
        for name, none in (("system", None), ("examples", ()), ("thinking", None)):
            if self.kind == "plain" and (value := getattr(self, name)) not in (none, []):
                raise ValueError(f"rollout.prompt.{name} is {value!r}; it goes with rollout.prompt.kind chat only")
        if self.template.count(PLACE) != 1:
            raise ValueError(f"rollout.prompt.template is {self.template!r}; it must hold {PLACE}, the question, once")

    def encode(self, tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> tuple[int, ...]:
        """The ids of a prompt, at least one.

        They begin with one beginning-of-sequence token, never two, where the tokenizer puts one in front by itself or the
        template writes it; otherwise with none. Raises ValueError for an empty question, for one with a character that the
        tokenizer has no token for, and for a chat where the tokenizer's template is missing or refuses it.
        """
        text = self.template.replace(PLACE, prompt.text)
        chat = self.kind == "chat"
        try:
            ids = self._chat(tokenizer, text) if chat else tokenizer(text, add_special_tokens=False)["input_ids"]
        except ValueError:
            raise
        except Exception as error:  # the tokenizers' own class, which says no more than that a token is missing
            known, name = tokenizer.get_vocab(), tokenizer.name_or_path
            strange = next((character for character in text if character not in known), None)
            what = str(error) if strange is None else f"character {strange!r} has no token"
            raise ValueError(
                f"the tokenizer of {name!r} cannot read prompt {prompt.uid!r}: {what}; choose another policy"
            ) from error
        if not ids or not prompt.text:
            raise ValueError(f"prompt {prompt.uid!r} has the text {prompt.text!r}; it must hold at least one token")
        bos = getattr(tokenizer, "bos_token_id", None)
        if bos is not None and (ids[0] == bos or tokenizer(text)["input_ids"][:1] == [bos]):
            written = next((place for place, token in enumerate(ids) if token != bos), len(ids))
            ids = [bos, *ids[written:]]
        return tuple(ids)

    def _chat(self, tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
        name, known = tokenizer.name_or_path, getattr(tokenizer, "chat_template", None)
        if not known:
            raise ValueError(f"rollout.prompt.kind is 'chat'; the tokenizer of {name!r} has no chat template: plain")
        if self.thinking is not None and "enable_thinking" not in str(known):
            raise ValueError(
                f"rollout.prompt.thinking is {self.thinking}; the chat template of {name!r} knows no such switch: null"
            )
        turns = [{"role": "system", "content": self.system}] if self.system is not None else []
        for question, answer in self.examples:
            turns.append({"role": "user", "content": self.template.replace(PLACE, question)})
            turns.append({"role": "assistant", "content": answer})
        turns.append({"role": "user", "content": text})
        switch: Any = {} if self.thinking is None else {"enable_thinking": self.thinking}
        try:
            ids: Any = tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, tokenize=True, return_dict=False, **switch
            )
        except Exception as error:  # whatever the template's author lets it raise, for example at a system turn
            raise ValueError(f"rollout.prompt: the chat template of {name!r} refuses it: {error}") from error
        return list(ids)


PLAIN = PromptFormat()
"""The text of a question as it stands."""
