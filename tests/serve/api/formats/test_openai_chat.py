"""Chat completions over HTTP, asked by OpenAI's own client: a verdict is a token."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from serve.api.app import create_app
from tests.serve.serving import MESSAGES, Serve, openai_client, serving
from tests.serve.toy_engine import ToyEngine

# Violation probabilities of 0.73, 0.27 and 0; the threshold is 0.25.
LOGITS = {"likely": 1.0, "flagged": -1.0, "impossible": -100.0}
P_FLAGGED = 1 / (1 + math.e)


@pytest.fixture(scope="module")
def engine() -> ToyEngine:
    return ToyEngine(LOGITS)


@pytest.fixture(scope="module")
def client(engine: ToyEngine) -> Iterator[httpx.Client]:
    with serving(create_app(engine)) as client:  # type: ignore[arg-type]
        yield client


def complete(sdk: openai.OpenAI, model: str = "likely", **options: Any) -> Any:
    options.setdefault("messages", MESSAGES)
    return sdk.chat.completions.create(model=model, **options)


def test_a_verdict_is_a_token_with_the_calibrated_probability(sdk: openai.OpenAI) -> None:
    completion = complete(sdk, logprobs=True, top_logprobs=5, max_tokens=1)
    (choice,) = completion.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "yes")
    (token,) = choice.logprobs.content
    assert (token.token, bytes(token.bytes)) == ("yes", b"yes")
    assert math.exp(token.logprob) == pytest.approx(1 - P_FLAGGED)
    assert [word.token for word in token.top_logprobs] == ["yes", "no"]
    assert sum(math.exp(word.logprob) for word in token.top_logprobs) == pytest.approx(1)
    usage = completion.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 1, 6)
    assert usage.prompt_tokens_details.cached_tokens == 3
    assert completion.system_fingerprint == "fp_0123456789ab"


def test_n_answers_are_the_same_and_the_salt_reaches_the_engine(
    engine: ToyEngine, sdk: openai.OpenAI
) -> None:
    completion = complete(sdk, n=3, temperature=0, extra_body={"cache_salt": "tenant 7"})
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    assert {choice.message.content for choice in completion.choices} == {"yes"}
    assert completion.choices[0].logprobs is None
    assert completion.usage.completion_tokens == 3
    assert engine.salts[-1] == "tenant 7"


@pytest.mark.parametrize(
    ("model", "answer", "p_yes"), [("flagged", "yes", P_FLAGGED), ("impossible", "no", 0.0)]
)
def test_the_answer_is_by_the_threshold_of_the_card_and_not_the_likelier_word(
    sdk: openai.OpenAI, model: str, answer: str, p_yes: float
) -> None:
    """A probability of zero is OpenAI's least."""
    choice = complete(sdk, model, logprobs=True, top_logprobs=2).choices[0]
    assert choice.message.content == answer
    no, yes = choice.logprobs.content[0].top_logprobs
    assert (no.token, yes.token) == ("no", "yes")
    assert math.exp(yes.logprob) == pytest.approx(p_yes) and yes.logprob < -0.5


def test_a_stream_is_the_answer_and_its_end_and_the_usage_if_asked_for(sdk: openai.OpenAI) -> None:
    with complete(
        sdk, stream=True, logprobs=True, stream_options={"include_usage": True}
    ) as stream:
        answer, end, usage = list(stream)
    assert (answer.choices[0].delta.content, answer.choices[0].finish_reason) == ("yes", None)
    assert answer.choices[0].logprobs.content[0].token == "yes"
    assert (end.choices[0].delta.content, end.choices[0].finish_reason) == (None, "stop")
    assert usage.choices == [] and usage.usage.total_tokens == 6
    with sdk.chat.completions.stream(model="likely", messages=MESSAGES) as helped:  # type: ignore[arg-type]
        assert helped.get_final_completion().choices[0].message.content == "yes"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"extra_body": {"treshold": 0.1}}, "Unrecognized request argument supplied: treshold"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: Input should be less than or"),
        ({"stream_options": {"include_usage": True}}, "stream_options needs stream"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
    ],
)
def test_a_wrong_parameter_is_named(
    sdk: openai.OpenAI, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        complete(sdk, **options)
    assert raised.value.type == "invalid_request_error"
    assert message in raised.value.message


def test_what_cannot_be_judged_is_an_error(sdk: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "cannot be judged"}]
    for is_stream in (False, True):
        with pytest.raises(openai.UnprocessableEntityError) as raised:
            complete(sdk, messages=messages, stream=is_stream)
        assert raised.value.code == "too_long"
        assert "1 of 1 rules; likely: it does not fit" in raised.value.message


def test_the_models_are_the_rules(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == list(LOGITS)
    model = sdk.models.retrieve("flagged")
    assert (model.id, model.object, model.owned_by) == ("flagged", "model", "centurion")
    for ask in (lambda: sdk.models.retrieve("gpt-5"), lambda: complete(sdk, "gpt-5")):
        with pytest.raises(openai.NotFoundError, match="not served: gpt-5") as raised:
            ask()
        assert raised.value.code == "model_not_found"


def test_the_fingerprint_is_of_the_weights_that_answered(serve: Serve) -> None:
    engine = ToyEngine(LOGITS)
    client = serve(engine)
    # The engine has new weights, and the catalogue does not know yet.
    renewed = vars(engine.rules["likely"]) | {"version": "fedcba9876543210"}
    engine.rules["likely"] = SimpleNamespace(**renewed)
    with openai_client(client) as sdk:
        assert complete(sdk).system_fingerprint == "fp_fedcba987654"
