r"""What stands around a number and is not part of it: a unit, a currency, a percent sign, degrees, the base."""

from __future__ import annotations

import re

PERCENT = "percent"

_NAMES: dict[str, tuple[str, ...]] = {
    "millimeter": ("mm",), "centimeter": ("cm",), "meter": ("m",), "kilometer": ("km",),
    "inch": ("in", "inches"), "foot": ("ft", "feet"), "yard": ("yd",), "mile": ("mi",),
    "milligram": ("mg",), "gram": ("g",), "kilogram": ("kg", "kilo"), "pound": ("lb",), "ounce": ("oz",), "ton": ("tonne",),
    "milliliter": ("ml",), "liter": ("l",), "gallon": ("gal",),
    "second": ("s", "sec"), "minute": ("min",), "hour": ("h", "hr"), "day": (), "week": (), "month": (), "year": ("yr",),
    "mile/hour": ("mph",), "kilometer/hour": ("kph", "kmh"),
    "dollar": ("usd",), "cent": ("¢",), "euro": ("€", "eur"), "pound sterling": ("£",), "rupee": ("₹",), "yen": ("¥",),
    "degree": ("deg",), "radian": ("rad",), "unit": (), PERCENT: ("percentage", "pct"),
}  # fmt: skip
_UNITS = {spelling: name for name, others in _NAMES.items() for spelling in (name, *others)}
_POWERS = {"square": "^2", "squared": "^2", "sq": "^2", "cubic": "^3", "cubed": "^3", "cu": "^3"}
_NO_UNIT = {"or", "and", "not", "to", "if", "when", "except", "remainder", "mod", "more", "less", "than"}
"""Words that say something about the number: what holds them is left alone."""
_FACTORS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}

# Without \text it is a unit if the table has it, in two letters or more (5m may be a product), or if it is a long word.
_BARE = "|".join(sorted((re.escape(u) for u in _UNITS if len(u) > 1), key=len, reverse=True))
_POWER = r"(?:\s*\^\s*\{?([23])\}?)?"
_MONEY = re.compile(r"([-+]?)\s*(\\dollar|[€£¥₹])\s*(?=[\d.])")
_WORDS = re.compile(r"\s*\\text\{([a-zA-Z ./()°¢]*)\}" + _POWER + "$")
_KNOWN = re.compile(
    rf"(?<=[\d}}) ])\s*((?:(?:square|sq\.?|cubic|cu\.?) )?(?:{_BARE})s?(?:\s*(?:/|per)\s*(?:{_BARE}|[hms])s?)?)" + _POWER + "$",
    re.IGNORECASE,
)
_LONG = re.compile(r"(?<=[\d}])\s+((?!(?:arc)?(?:sin|cos|tan|cot|sec|csc|log|exp|sqrt))[a-z]{4,}(?: [a-z]+)*)()$")
_DEGREES = re.compile(r"\s*\^\\circ\s*(?:\\text\{\s*([CF])\s*\}|([CF]))?$")
_ANGLE = re.compile(r"\\?(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_BASE = re.compile(r"(\d[\dA-F]*)_\{?(\d+)\}?")


def split_unit(text: str) -> tuple[str, str | None]:
    r"""`5\text{ cm}^2` becomes (`5`, `centimeter^2`); without a unit it is (`text`, None). `text` comes from `tidy`.

    `5\text{ million}` is a number: it becomes (`5\cdot 10^{6}`, None).
    """
    if match := _MONEY.match(text):
        rest = match[1] + text[match.end() :]
        return split_unit(rest)[0], unit_name("dollar" if match[2] == r"\dollar" else match[2])
    if text.endswith("%"):
        return _body(text, len(text) - 1, PERCENT)
    if (match := _DEGREES.search(text)) and not _ANGLE.search(text):
        return _body(text, match.start(), "degree" + (match[1] or match[2] or ""))
    if match := _BASE.fullmatch(text):
        return match[1], f"base {match[2]}"
    for pattern in (_WORDS, _KNOWN, _LONG):
        if (match := pattern.search(text)) and (name := unit_name(match[1])) is not None:
            body, unit = _body(text, match.start(), name + (f"^{match[2]}" if match[2] else ""))
            if unit in _FACTORS:
                return rf"{body}\cdot 10^{{{_FACTORS[unit]}}}", None
            return body, unit or None
    return text, None


def _body(text: str, end: int, unit: str) -> tuple[str, str | None]:
    """A unit alone, with no number before it, is the answer itself."""
    body = text[:end].rstrip()
    return (body, unit) if body else (text, None)


def unit_name(words: str) -> str | None:
    """`sq. cm`, `centimetres squared` and `square centimeter` have one name; None for words that are no unit."""
    parts = [part.split() for part in re.split(r"/|\bper\b", re.sub(r"[.()]", " ", words.lower()))]
    if any(word in _NO_UNIT for part in parts for word in part):
        return None
    return "/".join(_one(part) for part in parts)


def _one(words: list[str]) -> str:
    power = "".join(_POWERS.get(word, "") for word in words)
    return " ".join(_singular(word) for word in words if word not in _POWERS) + power


def _singular(word: str) -> str:
    word = re.sub(r"(lit|met)re", r"\1er", word)
    if word in _UNITS:
        return _UNITS[word]
    one = word.removesuffix("s") if len(word) > 2 else word
    return _UNITS.get(one, one)
