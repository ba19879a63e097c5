r"""When two answers are the same: the rules of docs/verification.md, on text alone.

They say what a percent sign, a unit, a name before `=` and a rounded number are worth. What is left, whether two formulas are
equal, is for `equal(gold, answer)`, which is `bapo.tasks.formulas` at work. The gold comes first: the rules are not symmetric.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from bapo.tasks.spelling import rational, split_top, tidy, words
from bapo.tasks.units import NO_NAME, PERCENT, addable, split_unit

Equal = Callable[[str, str], bool]

MAX_CHARACTERS = 1000
"""Of an answer and of a gold. The longest golds of MATH have about 200."""
_OR, _AND = (re.compile(rf"\s*,?\s*(?:\\text\{{\s*{word}\s*\}}|(?<=[\d)}}\w]) {word} )\s*") for word in ("or", "and"))
_CONDITION = re.compile(r"[<>]|\\(?:le|ge|ne|in)(?![a-zA-Z])")
_CHOICE = re.compile(r"\\text\{\s*\(([A-E])\)\s*\}\s*(\S.*)")
_COLONS = re.compile(r"\d+(?:\s*:\s*\d+)+", re.ASCII)
_LETTERS = re.compile(r"[A-Z](?: ?[A-Z])+")
_NAME = (
    r"(?:m?\\angle\s*)?(?:\|\s*[A-Za-z]+\s*\||\\overline\s*\{[A-Z]+\}|"
    r"\\text\{\s*[A-Za-z]+\s*\}|\\?[A-Za-z]+(?:_(?:\w|\{[^{}]*\}))?'*(?:\^\{?-1\}?)?(?:\([^()=]*\))?)"
)
_NO_NAME = rf"(?!\\(?:pi|infty)|(?:\\text\{{\s*)?(?i:{'|'.join(sorted(NO_NAME))})\b)"
_NAMES = re.compile(rf"{_NO_NAME}(?:{_NAME}|\(\s*{_NAME}(?:\s*,\s*{_NAME})*\s*\))")


_APPROX = re.compile(r"\\(?:approx|thickapprox)(?![a-zA-Z])")


def split_rounded(text: str) -> tuple[str, list[str]]:
    r"""`\sqrt2\approx 1.41` as what is said and what it is rounded to; a name before `\approx` is one as before `=`."""
    said = [part.strip() for part in _APPROX.split(text)]
    if len(said) > 1 and _NAMES.fullmatch(said[0]):
        said = said[1:]
    return said[0], said[1:]


def same_answer(gold: str, answer: str, equal: Equal) -> bool:
    """True if `answer` is the same as `gold`, by the rules of docs/verification.md? Asks `equal` for what no rule decides."""
    gold, answer = tidy(gold), tidy(answer)
    if gold == answer:
        return True
    if (wanted := words(gold)) is not None and (said := words(answer)) is not None:
        return wanted == said
    if "phantom{" in answer:  # what cannot be seen is no answer
        return False
    if (choice := _CHOICE.fullmatch(answer)) and not _CHOICE.fullmatch(gold):  # (B) 12
        return wanted == choice[1] or same_answer(gold, choice[2], equal)
    if choice := _CHOICE.fullmatch(gold):
        return words(answer) == choice[1] or same_answer(choice[2], answer, equal)
    if _COLONS.fullmatch(gold) and _COLONS.fullmatch(answer):  # a time, or a ratio in the terms that were asked for
        return [int(part) for part in gold.split(":")] == [int(part) for part in answer.split(":")]
    (gold, kind), (answer, other) = _unnamed(gold), _unnamed(answer)
    if {kind, other} == {"set", "pair"} or (other == "pair" and rational(split_unit(gold)[0]) is not None):
        return False
    golds, answers = split_top(gold, "="), split_top(answer, "=")
    if len(golds) > 1 and _NAMES.fullmatch(golds[0]) and (len(answers) == 1 or answers[0] == golds[0]):
        golds, answers = golds[-1:], answers[1:] or answers  # x = 5 against 5, or against x = 5
    elif len(golds) == 1 and len(answers) > 1:
        answers = (
            answers[1:] if _NAMES.fullmatch(answers[0]) and not _LETTERS.fullmatch(gold) else answers
        )  # the gold says no name: any will do
    if len(golds) > 1 and len(values := set(map(_value, golds))) == 1 and None not in values:  # 0.56 = 56%: either will do
        return all(any(_same_quantity(part, said, equal) for part in golds) for said in answers)
    if len(golds) > 1:  # an equation: the answer has to be one
        return len(answers) > 1 and equal(gold, answer)
    return all(_same_quantity(golds[0], said, equal) for said in answers)  # 2 + 2 = 4 is right if both are


def _value(text: str) -> Fraction | None:
    """The number that is said, a percent sign being a hundredth; None for anything else."""
    body, unit = split_unit(text)
    value = rational(body)
    return value / 100 if value is not None and unit == PERCENT else value if unit is None else None


def _unnamed(text: str) -> tuple[str, str | None]:
    """`x=2, x=3` becomes `2,3`, and `y=2, x=1` the pair `(1,2)`, in the order of the names. Other text is left as it is.

    With it goes what it is for certain: a set, a pair (or a longer tuple, or an interval), or None.
    """
    if words(text) is not None:
        said = text
    elif _CONDITION.search(text):
        return _OR.sub(r" \\lor ", _AND.sub(r" \\land ", text)), None
    else:
        said = _OR.sub(", ", _AND.sub(", ", text))
    pairs = [split_top(part, "=") for part in split_top(said, ",")]
    if len(pairs) < 2 or not all(len(pair) == 2 and re.fullmatch(_NAME, pair[0]) for pair in pairs):
        return said, _kind(said, several=said != text)
    names = [pair[0] for pair in pairs]
    if len(set(names)) == 1:
        return ",".join(value for _, value in pairs), "set"
    if len({name.partition("_")[0] for name in names}) == 1:  # x_1 and x_2
        return ",".join(value for _, value in sorted(pairs)), None
    if len(set(names)) < len(names) or not (names == sorted(names) or _neighbours(names)):
        return said, None  # x=1, a=2: which comes first is in the question
    return f"({','.join(value for _, value in sorted(pairs))})", "pair"


def _neighbours(names: list[str]) -> bool:
    """True for letters that follow each other in the alphabet, in any order, as y, x."""
    letters = sorted(names)
    return all(len(name) == 1 for name in names) and ord(letters[-1]) - ord(letters[0]) == len(letters) - 1


def _kind(text: str, several: bool) -> str | None:
    """several: the members of a list were joined by `or` or `and`, so that they have no order."""
    last = split_top(text, "=")[-1]
    if re.search(r"[<>]|\\(?:le|ge|ne|in|cup|cap)(?![a-zA-Z])", last):
        return None
    if len(split_top(last, ",")) > 1:
        return "set" if several else None
    if last.startswith(r"\{") and last.endswith(r"\}"):
        return "set" if len(split_top(last[2:-2], ",")) > 1 else None
    inside = last[:1] in ("(", "[") and last[-1:] in (")", "]") and len(split_top(last[1:-1], ",")) > 1
    return "pair" if inside else None


def _same_quantity(gold: str, answer: str, equal: Equal) -> bool:
    """A unit, like a percent sign, may be left out on either side; two units have to agree, none is converted.

    What the gold does not have has to be a unit for certain: `addable`.
    """
    golds, answers = split_top(gold, ","), split_top(answer, ",")
    thousands = any("," in side and rational(side) is not None for side in (gold, answer))  # 100,200 is one number
    if len(golds) > 1 and not thousands and all(rational(split_unit(part)[0]) is not None for part in golds + answers):
        return _same_members(golds, answers, equal)
    (wanted, unit), (said, other) = split_unit(gold), split_unit(answer)
    if unit != other and PERCENT in (unit, other):
        if unit is None:  # 28% is 0.28; beside a gold of 28 it is the answer to "what percent"
            size = rational(wanted)
            readings = [(wanted, rf"\frac{{{said}}}{{100}}")] + [(wanted, said)] * (size is None or abs(size) >= 1)
        else:
            readings = [(wanted, said), (rf"\frac{{{wanted}}}{{100}}", said)] * (other is None)
        return any(_same_value(*reading, equal) for reading in readings)
    return (unit == other or other is None or (unit is None and addable(other))) and _same_value(wanted, said, equal)


def _same_members(golds: list[str], answers: list[str], equal: Equal) -> bool:
    """True for lists of as many numbers, with or without units, in any order."""
    left = list(answers)
    for gold in golds:
        found = next((said for said in left if _same_quantity(gold, said, equal)), None)
        if found is None:
            return False
        left.remove(found)
    return not left


def _same_value(gold: str, answer: str, equal: Equal) -> bool:
    if gold == answer:
        return True
    members = split_top(gold, ",")
    if all(map(_LETTERS.fullmatch, members)):  # orders, names, choices: no products
        return sorted(str(words(member)) for member in members) == sorted(str(words(said)) for said in split_top(answer, ","))
    wanted, said = rational(gold), rational(answer)
    if wanted is not None and (said is not None or words(answer) is not None):
        return wanted == said  # exactly: 0.333 is not 1/3, and 2^-99 is not 2^-98
    if wanted is not None and len(split_top(answer, ",")) > 1:  # a list is no number
        return False
    return equal(gold if wanted is None else gold.replace(",", ""), answer if said is None else answer.replace(",", ""))


def formula(gold: str) -> str | None:
    """The part of a gold that a parser has to understand; None if there is nothing, as in a number or in words."""
    gold = tidy(gold)
    if words(gold) is not None or all(rational(split_unit(part)[0]) is not None for part in split_top(gold, ",")):
        return None
    return split_unit(_unnamed(gold)[0] if _CONDITION.search(gold) else gold)[0]


def canonical(text: str) -> str | None:
    r"""One spelling for votes, as far as text can tell: `x=5` and `5\text{ cm}` are 5, `2,1` is `1,2`, but `x+1` is not `1+x`.

    No gold and no parser is asked, so it may split equal answers, and it joins what a gold would tell apart: 5 cm and 5 m.
    """
    bare = tidy(text)
    if (said := words(bare)) is not None:
        return said or None
    parts = split_top(_unnamed(bare)[0], "=")
    body = parts[1] if len(parts) == 2 and _NAMES.fullmatch(parts[0]) else "=".join(parts)
    body = body[2:-2] if _kind(body, several=False) == "set" else body
    members = split_top(body, ",") if rational(body) is None else [body]
    return ",".join(sorted(map(_member, members))) or None


def _member(text: str) -> str:
    body, unit = split_unit(text)
    body = body if addable(unit) else text
    value = rational(body)
    return (words(body) or re.sub(r"\s+(?![a-zA-Z])", "", body)) if value is None else str(value)
