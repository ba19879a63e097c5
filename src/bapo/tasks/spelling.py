r"""Text of an answer in one spelling: `tidy` for what looks the same in print, `rational` for numbers, `words` for words."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_EXPONENT = 400
"""Of ten, in numbers that are compared here; others are formulas."""

_CHARACTERS = str.maketrans(
    {"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt ",
     "°": r"^\circ ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
     "∅": r"\emptyset ", "≈": r"\approx ", "²": "^2", "³": "^3", "％": "%", "’": "'", "\u00a0": " ",
     **{chr(0xFF10 + digit): str(digit) for digit in range(10)}}
)  # fmt: skip
_TIDY: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\\(?:mathrm|mathit|operatorname|rm)\s*\{\s*([ei])\s*\}", r"\1"),
        (r"\{\s*([^{}]*?)\s*\\choose(?![a-zA-Z])\s*([^{}]*?)\s*\}", r"\\binom{\1}{\2}"),
        (r"(?<=[\d.])\\(?:bar|dot)\s*(?:\{(\d+)\}|(\d))", r"\\overline{\1\2}"),
        (r"\((\d[\dA-F]*)\)\s*_", r"\1_"),  # a base
        (r"(?<=\d),\\!\s*(?=\d{3}(?!\d))", ","),
        (r"\\\$", r"\\dollar "),
        (r"(?<=\d)\$+(?=\d)", " "),
        (r"\\(?:boldsymbol|bm|underline|textcolor\s*\{\w+\})(?=\s*\{)|\\color\s*\{\w+\}", ""),
        (r"\\sqrt(\[[^\]]*\])?(?:\s+(\d+)|(?<=[t\]])(\d))(?![\d.])", r"\\sqrt\1{\2\3}"),
        (r"(?<!\\)\\[()\[\]]|\$|\\!|\\(?:left|right)(?![a-zA-Z])\.?|\\[bB]igg?[lr]?(?![a-zA-Z])", ""),
        (r"(?<=\d)(?:\\[,;: ]|~|\{,\})(?=\d{3}(?!\d))", ""),  # 1\,000 and 1{,}000
        (r"(?<=\d)\{,\}", ","),
        (r"(?<!\\)\\[,;: ]|~|\\q?quad(?![a-zA-Z])|\\(?:display|text)style(?![a-zA-Z])", " "),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:mathrm|mathbf|mathit|mathsf|textrm|textbf|textit|textnormal|mbox|hbox)\s*\{", r"\\text{"),
        (r"\\text\{\s*\\?%\s*\}|\\%", "%"),
        (r"\^?\s*\\degree(?![a-zA-Z])|\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![a-zA-Z])", r"^\\circ "),
        (r"<=|\\le(?:q|qslant)?(?![a-zA-Z])", r"\\le "),
        (r">=|\\ge(?:q|qslant)?(?![a-zA-Z])", r"\\ge "),
        (r"!=|\\neq?(?![a-zA-Z])", r"\\ne "),
        (r"\\varnothing(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"\\langle(?![a-zA-Z])", "("),
        (r"\\rangle(?![a-zA-Z])", ")"),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
        (r"\\frac\s*(\{[^{}]*\})\s*(\d)", r"\\frac\1{\2}"),
        (r"(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi "),
        (r"\s+", " "),
    )
)
_WRAPPED = re.compile(r"\{([^{}]+)\}|\\text\{\s*((?:\\dollar )?[-+.\d][^{}]*)\}")


def tidy(text: str) -> str:
    """One spelling of what looks the same in print; nothing is computed."""
    text = text.translate(_CHARACTERS)
    for pattern, new in _TIDY:
        text = pattern.sub(new, text)
    text = text.strip()
    text = text if text.endswith("..") else text.rstrip(".,; ")  # 0.333... has more digits
    while match := _WRAPPED.fullmatch(text):
        text = (match[1] or match[2]).strip()
    return text


def split_top(text: str, separator: str) -> list[str]:
    r"""`text` cut at each `separator` that stands in no bracket. Brackets are (), [] and {}; [1, 2) closes."""
    parts, begin, depth = [], 0, 0
    for index, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == separator and depth == 0:
            parts.append(text[begin:index].strip())
            begin = index + 1
    return [*parts, text[begin:].strip()]


_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)"
_NUMBER = rf"[-+]?\s*(?:{_DIGITS}(?:\.\d*)?|\.\d+)"
_PLAIN = re.compile(_NUMBER, re.ASCII)
_POWER_OF_TEN = re.compile(
    rf"({_NUMBER})\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*\{{?\s*([-+]?\d+)\s*\}}?|({_NUMBER})[eE]([-+]?\d+)", re.ASCII
)
_RATIO = re.compile(
    rf"([-+]?)\s*(?:\\frac\s*\{{\s*({_NUMBER})\s*\}}\s*\{{\s*({_NUMBER})\s*\}}|({_NUMBER})\s*/\s*({_NUMBER}))", re.ASCII
)
_MIXED = re.compile(r"([-+]?)\s*(\d+)\s*(?:\\frac\s*\{(\d+)\}\s*\{(\d+)\}|(?<=\s)(\d+)\s*/\s*(\d+))", re.ASCII)
_REPEATING = re.compile(r"([-+]?)\s*(\d*)\.(\d*)\\overline\s*\{(\d+)\}", re.ASCII)


def rational(text: str) -> Fraction | None:
    r"""The exact value of 1,000, -2.50, 3/4, \frac{3}{4}, 1\frac{1}{2}, 1.5\times 10^{3}, 0.\overline{3}; None for all else."""
    if _PLAIN.fullmatch(text):
        return _decimal(text)
    if match := _POWER_OF_TEN.fullmatch(text):
        exponent = int(match[2] or match[4])
        return _decimal(match[1] or match[3]) * Fraction(10) ** exponent if abs(exponent) <= MAX_EXPONENT else None
    if match := _RATIO.fullmatch(text):
        above, below = _decimal(match[2] or match[4]), _decimal(match[3] or match[5])
        return _sign(match[1]) * above / below if below else None
    if match := _MIXED.fullmatch(text):
        numerator, denominator = int(match[3] or match[5]), int(match[4] or match[6])
        return _sign(match[1]) * (int(match[2]) + Fraction(numerator, denominator)) if numerator < denominator else None
    if match := _REPEATING.fullmatch(text):
        once, again = match[3], match[4]
        value = Fraction(int(match[2] + once + again) - int("0" + match[2] + once), 10 ** len(once) * (10 ** len(again) - 1))
        return _sign(match[1]) * value
    return None


def _decimal(text: str) -> Fraction:
    return Fraction(re.sub(r"[\s,]", "", text))


def _sign(text: str) -> int:
    return -1 if text == "-" else 1


_WORDS = re.compile(
    r"\\text\{([^{}]*)\}|((?=.*[A-Za-z]{4})[A-Za-z][A-Za-z0-9 ,.:'-]*|(?i:yes|no|odd|dne)|[A-Z](?: ?[A-Z])+)|(\(?[A-Za-z]\)?)"
)


def words(text: str) -> str | None:
    r"""Text as it is compared: without `\text`, spaces and case, but the case of a single letter counts. None for a formula."""
    match = _WORDS.fullmatch(text)
    if not match:
        return None
    bare = re.sub(r"(?<!\d)\s|\s(?!\d)|\.(?!\d)|[\"']", "", match[1] or match[2] or match[3] or "")
    bare = re.sub(r"^\(([A-Za-z])\)$", r"\1", bare)
    return bare if len(bare) == 1 else bare.lower()


def last_digit(text: str) -> Fraction | None:
    """One unit in the last digit of a rounded number: 0.01 for 1.41, 1000 for 12,000; None for no plain number."""
    if not _PLAIN.fullmatch(text):
        return None
    whole, _, after = re.sub(r"[\s,+-]", "", text).partition(".")
    zeros = 0 if after else min(len(whole) - len(whole.rstrip("0")), len(whole) - 1)
    return Fraction(10) ** (-len(after) or zeros)
