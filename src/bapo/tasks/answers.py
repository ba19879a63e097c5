r"""The answer of a response: what stands in its last complete `\boxed{...}`, or after its last `####`, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Literal

from bapo.tasks.spelling import tidy
from bapo.tasks.units import addable, split_unit

AnswerIn = Literal["box", "hashes"]

# A box that opens; an escaped backslash before a brace (`\\{` is a line break and a group); an escaped brace; a brace.
_TOKEN = re.compile(r"(\\(?:boxed|fbox)\s*\{)|(?<!\\)(?:\\\\)+(?=[{}])|\\[{}]|([{}])")


def last_box(text: str) -> str | None:
    r"""Content of the `\boxed{...}` or `\fbox{...}` that opens last among those that are closed; None without one.

    Braces inside it count, escaped ones (`\{`) do not, as in LaTeX. A box that is never closed is no box, however many there
    are: one pass over the text. A box inside another one is none either: `\boxed{\boxed{5}}` has no answer.
    """
    opened: list[int | None] = []  # of each group that is still open: where its box's content begins, None if it is no box
    boxes: list[tuple[int, int]] = []
    for token in _TOKEN.finditer(text):
        if token[1]:
            opened.append(token.end())
        elif token[2] == "{":
            opened.append(None)
        elif token[2] == "}" and opened and (begin := opened.pop()) is not None:
            boxes.append((begin, token.start()))
    begin, end = max(boxes, default=(0, -1))
    return text[begin:end] if end >= 0 and max(close for _, close in boxes) == end else None


def after_hashes(text: str) -> str | None:
    """The line that follows the last `####`, as the prompts that verl makes of GSM8K ask for it; None without one."""
    _, found, after = text.rpartition("####")
    return (after.strip().splitlines() or [""])[0].strip() if found else None


READERS: dict[AnswerIn, Callable[[str], str | None]] = {"box": last_box, "hashes": after_hashes}
PLACES: dict[AnswerIn, str] = {"box": r"in a \boxed{...}", "hashes": "after ####"}
"""The place of the answer in a response, for messages."""


def plain(text: str) -> str:
    """`text` without white space, `$` and a full stop at its end: what mode exact compares, letter by letter.

    Between two digits a space stays, so that 1 2 is not 12.
    """
    apart = re.sub(r"(?<=[0-9])(?:\\?\$|\s)+(?=[0-9])", "\0", text)
    return re.sub(r"\\?\$|\s", "", apart).removesuffix(".").replace("\0", " ")


def small_integer(text: str) -> int | None:
    """0 to 999 as an answer sheet has it, one to three digits, zeros before them or not; None for all else, 25.0 too.

    Degrees may stand behind it.
    """
    body, unit = split_unit(tidy(text))  # 2 0 4 stays three numbers
    degrees = unit is None or unit.startswith("degree")
    return int(body) if degrees and re.fullmatch(r"[0-9]{1,3}", body) else None


_NUMBER = re.compile(r"([+-]?)((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)")


def number(text: str) -> Decimal | None:
    r"""`text` as a number, without currency, unit, percent sign, commas between thousands; None if it is none, or two.

    `20\%`, `70{,}000` and `18 \text{ dollars}` are 20, 70000 and 18: a word problem asks for a number of something.
    """
    body, unit = split_unit(tidy(re.sub(r"(?<=[0-9])\$+(?=[0-9])", " ", text).replace("\\$", "$").replace("$", "")))
    match = _NUMBER.fullmatch(re.sub(r"(?<![0-9.,])\s+|\s+(?![0-9.,])", "", body)) if addable(unit) else None
    return Decimal(match[1] + match[2].replace(",", "")) if match else None


def spell(value: Decimal) -> str:
    """The shortest spelling of a number: 0.5 for 0.50, 72 for 72.00."""
    digits = f"{value:f}"
    return "0" if not value else digits.rstrip("0").rstrip(".") if "." in digits else digits
