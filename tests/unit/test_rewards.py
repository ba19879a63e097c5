"""Reward terms, by hand."""

import pytest

from bapo.rollouts.grading import grade
from bapo.tasks.rewards import Format, Overlong
from bapo.types import Prompt, Sample


def response(length: int) -> Sample:
    return Sample("u", 0, 0, (1,)).extended((2,) * length, (-1.0,) * length, "stop", 0)


@pytest.mark.parametrize(
    ("length", "reward"), [(1, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (30000, -1.0)]
)
def test_overlong_is_dapos_line(length, reward):
    assert Overlong(max_tokens=20480)(response(length), "") == reward
    assert Overlong(max_tokens=20480, penalty=0.5)(response(length), "") == reward / 2


@pytest.mark.parametrize(
    ("text", "reward"),
    [("so\n\\boxed{4}.\n", 0.1), ("\\boxed{}", 0.0), ("4", 0.0), ("\\boxed{4", 0.0), ("", 0.0)],
)
def test_format_matches_the_whole_text(text, reward):
    assert Format(r".*\\boxed\{.+\}.*")(response(1), text) == reward
    assert Format(r"4")(response(1), "44") == 0.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Overlong(0), "max_tokens is 0; it must be >= 1"),
        (lambda: Overlong(8, 0.0), r"buffer_frac is 0.0; it must be in \(0, 1\]"),
        (lambda: Overlong(8, penalty=-1.0), "penalty is -1.0; it must be > 0"),
        (lambda: Format("("), r"pattern is '\('; it must be a regular expression"),
        (lambda: Format(".", 0.0), "reward is 0.0; it must be finite and not 0"),
    ],
)
def test_terms_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("value", [None, float("nan"), "1"])
def test_a_term_that_is_no_finite_number_is_named(value):
    class One:
        def verify(self, prompts, responses):
            return [1.0] * len(responses)

    class Tokenizer:
        def decode(self, ids, skip_special_tokens):
            return "x"

    with pytest.raises(ValueError, match=r"reward.odd gives .* for a response to 'p'; it must be a finite number"):
        grade(One(), Tokenizer(), [(Prompt("p", "q", "a"), response(1))], {"odd": lambda rollout, text: value})
