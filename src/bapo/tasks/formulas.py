"""Equality of two formulas, by latex2sympy and math-verify.

It may take forever, or all the memory there is: only worker processes import it (`bapo.tasks.compare`).
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from latex2sympy2_extended import NormalizationConfig, normalize_latex
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, _Latex2Sympy
from latex2sympy2_extended.logic import And
from latex2sympy2_extended.sets import FiniteSet
from math_verify import verify
from math_verify.grader import sympy_symbolic_eq
from sympy import Expr, Float, Intersection, MatrixBase, Ne, Rational, S, Union, nan, zoo
from sympy.core.relational import Relational

from bapo.tasks.equivalence import split_rounded
from bapo.tasks.spelling import last_digit, rational, split_top

DIGITS = 100
"""To which two closed forms have to agree."""
NORMALISATION = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none")
CONDITIONS = re.compile(r"[<>]|\\(?:le|ge|ne)(?![a-zA-Z])")
CONNECTIVES = r"\s*(\\land(?![a-zA-Z])|\\lor(?![a-zA-Z])|,)\s*"
CONVERSION = ConversionConfig(lowercase_symbols=False)


class NotParsedError(Exception):
    """`side`, "gold" or "answer", is no formula."""

    def __init__(self, side: str):
        super().__init__(side)
        self.side = side


class Parser(_Latex2Sympy):
    """Its own reading of a whole number beside another one, 2(3) = 5, is left out: `prepare` spells mixed numbers out."""

    def convert_postfix_list(self, arr: Any, i: int = 0) -> Any:
        left = self.convert_postfix(arr[i])
        if i + 1 == len(arr) or not isinstance(left, Expr | MatrixBase):
            return super().convert_postfix_list(arr, i)
        right = self.convert_postfix_list(arr, i + 1)
        matrix = isinstance(left, MatrixBase) or isinstance(right, MatrixBase)
        return (self.mat_mul_flat if matrix else self.mul_flat)(left, right)


def prepare(text: str) -> str:
    r"""Mixed numbers as sums, decimals as fractions, since sympy's are binary, i as I, no commas within numbers."""
    text = re.sub(r"(\d)\s+(\d+)\s*/\s*(\d+)", r"\1\\frac{\2}{\3}", text)
    if re.search(r"(?<![_^\d])\d+ \d", text):
        raise ValueError("two numbers side by side")
    if re.search(r"(?<![\w}{\\])\d+\s*_|\d\s*(?:'|\"|\^\s*\{?\s*\\prime)|\.\.|…|\\[lcbv]?dots", text):
        raise ValueError("a number with an index, a mark or dots")
    if not re.search(r"[(\[]|\\\{", text):  # in brackets a comma separates
        text = re.sub(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])", lambda match: match[0].replace(",", ""), text)
    text = re.sub(r"(?<![\d.^_])(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}", _mixed, text)
    if re.search(r"\\frac\{[^{}]*\\(?:pm|mp)(?![a-zA-Z])", text):  # within a fraction it does not parse
        text = ", ".join(text.replace(r"\pm", sign).replace(r"\mp", other) for sign, other in ("+-", "-+"))
    text = re.sub(r"(\d*)\.(\d*)\\overline\s*\{(\d+)\}", _repeating, text)
    text = re.sub(r"(\d*)\.(\d+)", lambda match: _fraction(Fraction("0" + match[0])), text)
    if re.search(r"\\(?:sum|prod)(?![a-zA-Z])", text):
        return text
    text = re.sub(r"\\text\{[^{}]*\}|\\[a-zA-Z]+|_\{?\w+\}?|[a-zA-Z]+", _imaginary, text)
    return re.sub(r"I(?=\s*\^)", "{I}", text)  # the parser drops the power of a bare I


def _mixed(match: re.Match[str]) -> str:
    whole, above, below = match.groups()
    return rf"({whole}+\frac{{{above}}}{{{below}}})" if int(above) < int(below) else rf"{whole}\cdot\frac{{{above}}}{{{below}}}"


def _repeating(match: re.Match[str]) -> str:
    value = rational(match[0])
    assert value is not None
    return _fraction(value)


def _fraction(value: Fraction) -> str:
    return rf"{{\frac{{{value.numerator}}}{{{value.denominator}}}}}"


def _imaginary(match: re.Match[str]) -> str:
    """In 3+4i and bi, not in words, commands and indices."""
    letters = match[0]
    return letters.replace("i", "I") if letters.isalpha() and len(letters) <= 2 and letters != "pi" else letters


@lru_cache(maxsize=256)
def parse(text: str) -> Any:
    """Parses it into sympy; nothing is evaluated. Raises whatever the parser does."""
    if CONDITIONS.search(text) and len(parts := re.split(CONNECTIVES, text)) > 1:
        return _joined(parts)
    text = normalize_latex(prepare(text), NORMALISATION)
    found = Parser(is_real=True, convert_degrees=True, config=CONVERSION).parse(text)
    if isinstance(found, Ne):  # math-verify knows no such relation
        if len(found.free_symbols) != 1:
            raise ValueError("a condition that nothing can be compared with")
        return found.as_set()
    return found


def _joined(parts: list[str]) -> Any:
    r"""The set of conditions on one variable: `\land` is an intersection, `\lor` a union.

    A comma is an intersection, unless that is empty: x < 1, x > 5.
    """
    conditions = [parse(part.strip()) for part in parts[::2]]
    if len({symbol for condition in conditions for symbol in condition.free_symbols}) > 1:
        raise ValueError("conditions on several variables")
    sets = [condition.as_set() if isinstance(condition, Relational | And) else condition for condition in conditions]
    whole = sets[0]
    for connective, other in zip(parts[1::2], sets[1:], strict=True):
        both = Intersection(whole, other)
        whole = Union(whole, other) if connective == r"\lor" or (connective == "," and both.is_empty) else both
    return whole


def parse_side(side: str, text: str) -> Any:
    try:
        return parse(split_rounded(text)[0])
    except (MemoryError, RecursionError):
        raise
    except Exception as error:
        raise NotParsedError(side) from error


def equal(gold: str, answer: str) -> bool:
    """True if two formulas have one value. Closed forms to `DIGITS` digits, relative to their size, the rest by math-verify."""
    left, right = parse_side("gold", gold), parse_side("answer", answer)
    if not all(rounds_to(right, rounded) for rounded in split_rounded(answer)[1]):
        return False
    if isinstance(left, Expr) and len(split_top(answer, ",")) > 1:  # 5, 5
        return False
    if left is S.EmptySet and isinstance(right, Relational | And):  # math-verify takes every relation for it
        return bool(right.as_set().is_empty)
    if left is S.Reals and isinstance(right, FiniteSet):  # and the set of both infinities for all between them
        return False
    if isinstance(left, Expr) and isinstance(right, Expr):
        if not left.free_symbols and not right.free_symbols:
            return same_number(left, right)
        if left.is_Symbol != right.is_Symbol and sympy_symbolic_eq(left, right):  # math-verify compares their names alone
            return True
    # Its own timeout works in main threads only. 15 digits, its default, take 2^-99 for 2^-98.
    return bool(
        verify(left, right, numeric_precision=DIGITS, allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True)
    )


def rounds_to(exact: Any, rounded: str) -> bool:
    """True if `rounded`, a plain number, is `exact` rounded to its last digit, or cut off there."""
    value, step = rational(rounded), last_digit(rounded)
    if value is None or step is None or not isinstance(exact, Expr) or exact.free_symbols:
        return False
    near, unit = (Rational(number.numerator, number.denominator) for number in (value, step))
    off = exact.doit().evalf(DIGITS) - near
    if not off.is_real or not off.is_finite:
        return False
    return bool(abs(off) <= unit / 2 or (abs(off) < unit and off * near >= 0))


def same_number(left: Any, right: Any) -> bool:
    left, right = left.doit(), right.doit()
    if left == right:
        return left is not nan and left is not zoo
    if left.is_Rational and right.is_Rational:
        return False
    x, y = left.evalf(DIGITS), right.evalf(DIGITS)
    if not x.is_number or not y.is_number or not x.is_finite or not y.is_finite:
        return False
    difference = abs(x - y)
    if difference <= Float(10) ** (5 - DIGITS) * max(abs(x), abs(y)):
        return True
    # Digits cancel where a root is zero without looking like it.
    return bool(difference < Float(10) ** (-DIGITS // 2)) and bool((left - right).equals(0))
