from __future__ import annotations

import pytest

from eval.judge.endpoint import EndpointJudge
from eval.judge.judges import BareBase, NoJudge, judge_from, judge_on
from guard.errors import GuardError
from guard.recipe import load_recipe

SET = {"JUDGE_BASE_URL": "http://x", "JUDGE_MODEL": "m"}


def test_an_endpoint_that_is_described_judges_and_else_the_base() -> None:
    assert isinstance(judge_from({"PATH": "/bin", "JUDGE_API_KEY": "left over"}), BareBase)
    assert isinstance(judge_from(SET), EndpointJudge)


def test_settings_are_read_from_the_environment() -> None:
    more = {"JUDGE_API_KEY": " k\r\n", "JUDGE_OPTIONS": '{"reasoning_effort": "low"}'}
    more |= {"JUDGE_CONCURRENCY": "2", "JUDGE_TIMEOUT_S": "1.5"}
    judge = judge_from(SET | more | {"JUDGE_PRICE_IN": "0.4", "JUDGE_PRICE_OUT": "1.6"})
    options = {"reasoning_effort": "low"}
    assert judge == EndpointJudge("http://x", "m", "k", options, 2, 1.5, 0.4, 1.6)
    assert "k'" not in repr(judge)  # the key never reaches a log


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"JUDGE_MODEL": "m"}, "JUDGE_BASE_URL is not set"),
        ({"JUDGE_BASE_URL": "x", "JUDGE_MODEL": "m"}, "http"),
        (SET | {"JUDGE_CONCURRENCY": "0"}, "JUDGE_CONCURRENCY.*for example 8"),
        (SET | {"JUDGE_OPTIONS": "[1]"}, "JUDGE_OPTIONS.*JSON object.*For example"),
        (SET | {"JUDGE_OPTIONS": '{"temperature": NaN}'}, "JUDGE_OPTIONS.*NaN is not JSON"),
        (SET | {"JUDGE_TIMEOUT_S": "0"}, "JUDGE_TIMEOUT_S.*for example 60"),
        (SET | {"JUDGE_TIMEOUT_S": "inf"}, "JUDGE_TIMEOUT_S"),
        (SET | {"JUDGE_PRICE_IN": "nan"}, "JUDGE_PRICE_IN"),
        (SET | {"JUDGE_PRICE_OUT": "-1"}, "JUDGE_PRICE_OUT"),
    ],
)
def test_half_or_bad_settings_are_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(GuardError, match=message):
        judge_from(environment)


@pytest.mark.parametrize("character", ["\n", "\u00e9", "\x00"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(character: str) -> None:
    told = r"JUDGE_API_KEY holds a character.*Copy the key again"
    with pytest.raises(GuardError, match=told) as caught:
        judge_from(SET | {"JUDGE_API_KEY": f"sk-se{character}cret"})
    assert "cret" not in str(caught.value)


def test_nobody_judges_for_an_encoder_unless_an_endpoint_does() -> None:
    encoder, decoder = load_recipe("minilm"), load_recipe("tiny")
    assert isinstance(judge_on(encoder, None), NoJudge)
    assert isinstance(judge_on(encoder, BareBase()), NoJudge)
    assert isinstance(judge_on(decoder, None), BareBase)
    endpoint = judge_from(SET)
    assert judge_on(encoder, endpoint) is endpoint
