r"""Text around a number that is not part of it: a unit, a currency, a percent sign, degrees, the base."""

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
_NUMBER_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen "
    "nineteen twenty thirty forty fifty sixty seventy eighty ninety half halve third quarter fourth fifth sixth seventh eighth "
    "ninth tenth eleventh twelfth twentieth hundredth thousandth millionth halves"
)
_SAYING = (
    "or and not no non never nor to if when except but without remainder mod modulo more less fewer than greater smaller "
    "larger bigger higher lower most least at above below over under between beyond before after exceeding about around "
    "approximately approx almost nearly roughly maybe perhaps probably possibly is are was be wrong false incorrect right "
    "true correct minus plus times divided multiplied by negative positive double triple twice thrice factorial root power "
    "choose halved doubled tripled repeating recurring infinity infinite infinitely undefined unknown impossible otherwise "
    "score gross couple pair myriad instead only any all none "
    "minimum maximum max inverse reciprocal absolute imaginary sin cos tan log"
)
NO_UNIT = frozenset(f"{_NUMBER_WORDS} {_SAYING}".split())
"""Words that say something about the number: what holds them is left alone."""
NO_NAME = frozenset(f"{_NUMBER_WORDS} not never wrong false incorrect".split())
"""Words that are no name before `=`."""
_BESIDE = frozenset(["old", "long", "wide", "tall", "high", "deep", "away", "apart", "each", "total", "altogether"])
"""Words that say nothing beside a unit."""
_FACTORS = {"dozen": "12", "hundred": "10^{2}", "thousand": "10^{3}", "lakh": "10^{5}", "crore": "10^{7}"} | {
    f"{word}illion": f"10^{{{power}}}" for word, power in (("m", 6), ("b", 9), ("tr", 12))
}

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

    `5\text{ million}` is a number: it becomes (`5\cdot 10^{6}`, None), and with `dollars` behind it has a unit as well.
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
            factor, _, rest = (unit or "").partition(" ")
            return (rf"{body}\cdot {_FACTORS[factor]}", rest or None) if factor in _FACTORS else (body, unit or None)
    return text, None


def _body(text: str, end: int, unit: str) -> tuple[str, str | None]:
    """A unit alone, with no number before it, is the answer itself."""
    body = text[:end].rstrip()
    return (body, unit) if body else (text, None)


def unit_name(words: str) -> str | None:
    """`sq. cm`, `centimetres squared` and `square centimeter` have one name; None for words that are no unit."""
    parts = [part.split() for part in re.split(r"/|\bper\b", re.sub(r"[.()]", " ", words.lower()))]
    said = [word for part in parts for word in part]
    if any(word in NO_UNIT or word.removesuffix("s") in NO_UNIT or word.removesuffix("es") in NO_UNIT for word in said) or (
        said and set(said) <= set(_POWERS)
    ):
        return None
    if re.fullmatch(r"\s*[A-Z]\s*", words) and words.strip() != "L":  # 5 M is no length
        return None
    if any(len(word) < 3 and word not in _UNITS and word not in _POWERS for word in said):
        return None
    return "/".join(_one([word for word in part if word not in _BESIDE] or part) for part in parts)


def addable(unit: str | None) -> bool:
    """True if an answer may have it where the gold has none: known units, and at most one other word, a noun.

    None, no unit, may be. A base may not: it makes another number of the digits.
    """
    if unit is None or unit in _UNITS.values() or unit.startswith("degree"):
        return True
    if unit.startswith("base "):
        return False
    bare = re.sub(r"\^[23]", "", unit).replace("pound sterling", "pound")
    return sum(word not in _UNITS.values() for word in re.split(r"[/ ]", bare) if word) <= 1


def _one(words: list[str]) -> str:
    power = "".join(_POWERS.get(word, "") for word in words)
    return " ".join(_singular(word) for word in words if word not in _POWERS) + power


def _singular(word: str) -> str:
    word = re.sub(r"(lit|met)re", r"\1er", word)
    if word in _UNITS:
        return _UNITS[word]
    one = word.removesuffix("s") if len(word) > 2 else word
    return _UNITS.get(one, one)
