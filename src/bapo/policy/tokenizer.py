"""A tokenizer with one token per character, for tasks whose alphabet is small."""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

PAD = "<pad>"


def character_tokenizer(alphabet: str, eos: str) -> PreTrainedTokenizerFast:
    """A Hugging Face tokenizer: id 0 is `PAD`, id 1 is `eos`, the characters of `alphabet` follow in order.

    PAD is a token of its own: a pad that doubled as EOS would hide the end of a response. Nothing is added at either end of a
    text. A character outside the alphabet makes encoding fail; `check_alphabet` names it.
    """
    if len(eos) != 1:
        raise ValueError(f"eos is {eos!r}; it must be one character")
    if not alphabet:
        raise ValueError("alphabet is empty; it must hold at least one character")
    twice = sorted({c for c in alphabet + eos if (alphabet + eos).count(c) > 1})
    if twice:
        raise ValueError(f"alphabet {alphabet!r} and eos {eos!r} hold {twice} more than once; every character must differ")
    vocabulary = {token: index for index, token in enumerate([PAD, eos, *alphabet])}
    # The unknown token is one that no single character can be, so that an unknown character raises.
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unknown>"))
    backend.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=AddedToken(PAD, special=True, normalized=False),
        eos_token=AddedToken(eos, special=True, normalized=False),
        padding_side="right",
        clean_up_tokenization_spaces=False,
    )


def check_alphabet(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    """Raises ValueError naming the first character of `text` that has no token."""
    vocabulary = tokenizer.get_vocab()
    for position, character in enumerate(text):
        if character not in vocabulary:
            raise ValueError(f"character {character!r} at position {position} of {text!r} is not in the tokenizer's alphabet")
