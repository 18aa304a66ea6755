"""The rewards that ship: right values, and the tricks that each of them must not fall for."""

from __future__ import annotations

import sys

import pytest

from trace_lightning.tasks import CutOff, Format, MathVerify, Overlong, RegexMatch, Repetition, Sample
from trace_lightning.types import Problem


def answered(answer) -> Problem:
    return Problem(prompt="q", answer=answer)


@pytest.mark.parametrize(
    ("completion", "value"),
    [("so #### 42", 1.0), ("#### 41\n#### 42", 1.0), ("#### 42\n#### 41", 0.0), ("42", 0.0), ("####  042", 0.0)],
)
def test_regex_match_takes_the_last(completion, value) -> None:
    assert RegexMatch(r"####\s*(-?[0-9]+)")(completion, answered(42)).value == value


def test_regex_match_without_case() -> None:
    assert RegexMatch("answer: (.*)", ignore_case=True)("ANSWER: Paris", answered("paris")).value == 1.0
    assert RegexMatch("answer: (.*)")("answer: Paris", answered("paris")).value == 0.0


GOOD = "<think>\na < b\n</think>\n<answer>4</answer>"


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        (GOOD, 1.0),
        (f"  {GOOD}\n", 1.0),
        (f"{GOOD} and more", 0.0),
        (GOOD.replace("</think>", ""), 0.0),
        ("<answer>4</answer><think>late</think>", 0.0),
        (GOOD + GOOD, 0.0),
        ("<think><answer>3</answer></think><answer>4</answer>", 0.0),
        ("<think>a</think>x<answer>4</answer>", 0.0),
    ],
)
def test_format_asks_for_one_thought_and_one_answer(completion, value) -> None:
    assert Format()(completion, answered(4)) == value


def test_format_with_a_pattern_of_ones_own() -> None:
    assert Format(r"\d+")(" 12 ", answered(0)) == 1.0
    assert Format(r"\d+")("12 apples", answered(0)) == 0.0


@pytest.mark.parametrize(("tokens", "value"), [(0, 0.0), (60, 0.0), (70, -0.25), (80, -0.5), (100, -1.0), (140, -1.0)])
def test_overlong_is_dapos_ramp(tokens, value) -> None:
    """max 100, buffer 40: 0 up to 60, then (60 - L) / 40, then -1."""
    reward = Overlong(max_tokens=100, buffer=40)
    assert reward.score(Sample(text="", problem=answered(0), num_tokens=tokens)) == pytest.approx(value)


def test_cut_off_is_about_the_finish_reason() -> None:
    cut, ended = (Sample(text="", problem=answered(0), finish_reason=reason) for reason in ("length", "stop"))
    assert (CutOff().score(cut), CutOff().score(ended)) == (-1.0, 0.0)


@pytest.mark.parametrize(
    ("text", "value"),
    [("", 0.0), ("a b", 0.0), ("a b c d e", 0.0), ("a b a b a b", -0.6), ("x " * 101, -0.99)],
)
def test_repetition_is_the_share_of_bigrams_seen_before(text, value) -> None:
    """`a b a b a b` has the bigrams ab ba ab ba ab: 2 of 5 are new."""
    assert Repetition(n=2)(text, answered(0)) == pytest.approx(value)


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        (r"\boxed{42}", 42, 1.0),
        (r"so \boxed{41}, no: \boxed{42}.", "42", 1.0),
        ("<answer>42</answer>", 42, 1.0),
        (r"<answer>\boxed{42}</answer>", 42, 1.0),
        ("<answer>41</answer> <answer> $42$ </answer>", 42, 1.0),
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{2\sqrt{2}}", r"\sqrt{8}", 1.0),
        (r"\boxed{\{2, 1\}}", r"\{1,2\}", 1.0),
        (r"\boxed{1,000}", 1000, 1.0),
        (r"\boxed{50\%}", 0.5, 1.0),
        (r"\boxed{(x+1)^2}", "$x^2+2x+1$", 1.0),
        (r"\boxed{[0, 1)}", "[0,1)", 1.0),
        (r"\boxed{43}", 42, 0.0),
        (r"\boxed{41 or 42}", 42, 0.0),
        (r"\boxed{41, 42}", 42, 0.0),
        ("41 or 42", 42, 0.0),
        ("42", 42, 0.0),
        (r"\boxed{42", 42, 0.0),
        (r"\boxed{}", 42, 0.0),
        ("<answer></answer>", 42, 0.0),
        ("", 42, 0.0),
    ],
)
def test_math_is_compared_by_value_in_the_final_answer_alone(completion, answer, value) -> None:
    pytest.importorskip("math_verify")
    reward = MathVerify()
    reward.prepare()
    score = reward(completion, answered(answer))
    assert score.value == value, score.reason


def test_math_anywhere_and_without_tags() -> None:
    pytest.importorskip("math_verify")
    assert MathVerify(anywhere=True)("It is 42.", answered(42)).value == 1.0
    assert MathVerify(answer_tag=None)("<answer>42</answer>", answered(42)).value == 0.0
    assert MathVerify(answer_tag="final")("<final>42</final>", answered(42)).value == 1.0


def test_an_answer_that_is_no_mathematics_is_the_data_sets_fault() -> None:
    pytest.importorskip("math_verify")
    with pytest.raises(ValueError, match="the answer '' of the problem is not read as mathematics"):
        MathVerify()(r"\boxed{1}", answered(""))


def test_a_missing_package_names_the_extra(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ImportError, match=r"trace-lightning\[math\]"):
        MathVerify()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RegexMatch("(a"), r"pattern='\(a' is not a regular expression"),
        (lambda: RegexMatch("a"), "0 groups, exactly one"),
        (lambda: RegexMatch("(a)(b)"), "2 groups, exactly one"),
        (lambda: Format("["), "not a regular expression"),
        (lambda: Overlong(max_tokens=10, buffer=11), "buffer=11"),
        (lambda: Overlong(max_tokens=10, buffer=0), "buffer=0"),
        (lambda: Repetition(n=0), "n=0"),
    ],
)
def test_bad_arguments(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("reward", [Overlong(max_tokens=10, buffer=1), CutOff()], ids=lambda reward: reward.name)
def test_a_text_alone_has_no_length_in_tokens(reward) -> None:
    with pytest.raises(ValueError, match=r"call score\(sample\)"):
        reward("text", answered(0))
