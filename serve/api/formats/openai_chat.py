"""OpenAI's chat completions: a rule is a model whose answer is one token, "yes" or "no".

    POST /v1/chat/completions   {"model": "medical_advice", "messages": [...], "logprobs": true}
    GET  /v1/models             the rules, as models; GET /v1/models/{model} is one of them

"yes" means that the conversation violates the rule, by the threshold of its card. The
log-probabilities are those of the calibrated probability, so that with a threshold other than a
half the answer need not be the likelier word. Without a verdict there is no completion: status 422,
and the code says why. Knows nothing of other formats.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse
from openai.pagination import SyncPage
from openai.types import CompletionUsage, Model
from openai.types.chat import ChatCompletion, ChatCompletionMessage, ChatCompletionTokenLogprob
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs
from openai.types.chat.chat_completion_token_logprob import TopLogprob
from openai.types.completion_usage import PromptTokensDetails
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from guard.prompt.decoder import NO, YES
from guard.verdict import Verdict
from serve.api.access import Caller
from serve.api.formats.conversation import ChatMessages, NoHiddenWords, from_chat, openai_error
from serve.api.input.limits import MAX_SALT, MAX_TOOLS
from serve.api.input.strict_json import StrictRoute
from serve.api.service import CheckService, Question
from serve.api.wire_format import ASKED, REPLY, RULE, ExampleRequest, WireFormat
from serve.engine import Check

router = APIRouter(route_class=StrictRoute)
MAX_CHOICES = 128
LEAST_LOGPROB = -9999.0  # OpenAI's value for a very unlikely token
STARTED = int(time.time())

# Parameters of the API that steer how text is generated, and change no verdict.
WITHOUT_EFFECT = (
    *("frequency_penalty", "presence_penalty", "seed", "stop", "temperature", "top_p", "verbosity"),
    *("function_call", "tool_choice", "parallel_tool_calls", "reasoning_effort", "service_tier"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    *("metadata", "safety_identifier", "store", "user"),
)


class TextFormat(NoHiddenWords):
    """The one format that an answer can have."""

    type: Literal["text"]


class StreamOptions(NoHiddenWords):
    """What a stream says beside its answer."""

    include_usage: bool = False


class ChatCompletionRequest(BaseModel):
    """A conversation with the tools that the model may call, and the rule that it is put to.

    `functions` are tools by their old name. `cache_salt` is vLLM's name for it, and does what it
    does in `/v1/check`.
    """

    model_config = ConfigDict(extra="allow")

    model: str
    messages: ChatMessages
    tools: Annotated[list[dict[str, Any]] | None, Field(max_length=MAX_TOOLS)] = None
    functions: Annotated[list[dict[str, Any]] | None, Field(max_length=MAX_TOOLS)] = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: TextFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT)] | None = None


@router.post(
    "/v1/chat/completions", response_model=ChatCompletion, response_model_exclude_unset=True
)
async def complete(
    body: ChatCompletionRequest, request: Request
) -> ChatCompletion | StreamingResponse:
    """Put a conversation to the rule that is called like the model."""
    _refuse_contradictions(body)
    rule_set = Caller.of(request).catalogue.selected([body.model])
    conversation = from_chat(body.messages, [*(body.tools or ()), *(body.functions or ())])
    question = Question(rule_set, cache_salt=body.cache_salt)
    ((check, _),) = await CheckService.of(request).judge_each(request, [conversation], question)
    undecided = Verdict(body.model, 0.0, 0.0, 1.0)
    choices = _choices(next(iter(check.verdicts), undecided), body)
    version = check.versions.get(body.model, "")
    completion = ChatCompletion(
        id=f"chatcmpl-{uuid.uuid4().hex}",
        object="chat.completion",
        created=int(time.time()),
        model=body.model,
        system_fingerprint=f"fp_{version[:12]}",
        choices=choices,
        usage=_usage(check, len(choices)),
    )
    if not body.stream:
        return completion
    options = body.stream_options or StreamOptions()
    events = _events(completion, include_usage=options.include_usage)
    return StreamingResponse(events, media_type="text/event-stream")


@router.get("/v1/models", response_model_exclude_unset=True)
async def models(request: Request) -> SyncPage[Model]:
    """The rules that are served, as models."""
    rules = Caller.of(request).catalogue.rules
    return SyncPage(object="list", data=[_model(rule) for rule in rules])


@router.get("/v1/models/{model}", response_model_exclude_unset=True)
async def model(model: str, request: Request) -> Model:
    """One rule, as a model."""
    Caller.of(request).catalogue.card(model)
    return _model(model)


def _model(rule: str) -> Model:
    return Model(id=rule, object="model", created=STARTED, owned_by="centurion")


def _refuse_contradictions(body: ChatCompletionRequest) -> None:
    """Raise HTTPException 400 for parameters that the API does not have, or not together."""
    for name in body.model_extra or ():
        if name not in WITHOUT_EFFECT:
            raise HTTPException(400, f"Unrecognized request argument supplied: {name}")
    if body.top_logprobs is not None and not body.logprobs:
        raise HTTPException(400, "top_logprobs needs logprobs to be true")
    if body.stream_options is not None and not body.stream:
        raise HTTPException(400, "stream_options needs stream to be true")


def _choices(verdict: Verdict, body: ChatCompletionRequest) -> list[Choice]:
    answer = YES if verdict.violates else NO
    message = ChatCompletionMessage(role="assistant", content=answer, refusal=None)
    logprobs = None
    if body.logprobs:
        logprobs = _logprobs(verdict, answer, body.top_logprobs or 0)
    choice = Choice(index=0, message=message, logprobs=logprobs, finish_reason="stop")
    return [choice.model_copy(update={"index": index}) for index in range(body.n or 1)]


def _logprobs(verdict: Verdict, answer: str, alternatives: int) -> ChoiceLogprobs:
    words = {YES: _word(YES, verdict.p_violation), NO: _word(NO, 1 - verdict.p_violation)}
    likeliest = sorted(words.values(), key=lambda word: -word.logprob)[:alternatives]
    word = words[answer].model_dump()
    token = ChatCompletionTokenLogprob(**word, top_logprobs=likeliest)
    return ChoiceLogprobs(content=[token], refusal=None)


def _word(word: str, p: float) -> TopLogprob:
    logprob = LEAST_LOGPROB
    if p > 0:
        logprob = math.log(p)
    return TopLogprob(token=word, logprob=logprob, bytes=list(word.encode()))


def _usage(check: Check, choices: int) -> CompletionUsage:
    prompt_tokens = check.cached_tokens + check.computed_tokens
    return CompletionUsage(
        prompt_tokens=prompt_tokens,
        completion_tokens=choices,
        total_tokens=prompt_tokens + choices,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=check.cached_tokens),
    )


def _events(completion: ChatCompletion, *, include_usage: bool) -> Iterator[str]:
    """The completion as server-sent events: the answer, how it ended, and what was asked for."""
    chunk = completion.model_dump(include={"id", "created", "model", "system_fingerprint"})
    chunk["object"] = "chat.completion.chunk"
    for choice in completion.choices:
        answer = choice.model_dump(include={"index", "logprobs"}, exclude_unset=True)
        delta = choice.message.model_dump(exclude_unset=True)
        yield _event(chunk | {"choices": [answer | {"delta": delta, "finish_reason": None}]})
        end = {"index": choice.index, "delta": {}, "logprobs": None, "finish_reason": "stop"}
        yield _event(chunk | {"choices": [end]})
    if include_usage and completion.usage:
        usage = completion.usage.model_dump(exclude_unset=True)
        yield _event(chunk | {"choices": [], "usage": usage})
    yield "data: [DONE]\n\n"


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


def _reading(text: str) -> list[str]:
    answers: list[str | None] = []
    if text.startswith("data: "):
        for line in text.splitlines():
            if line.startswith("data: {"):
                choices = json.loads(line.removeprefix("data: "))["choices"]
                answers += [choice["delta"].get("content") for choice in choices]
    else:
        answers = [choice["message"]["content"] for choice in json.loads(text)["choices"]]
    return ["violation" if answer == YES else "allow" for answer in answers if answer is not None]


FORMAT = WireFormat(
    router,
    openai_error,
    _reading,
    requests=(
        ExampleRequest(
            "/v1/chat/completions", {"model": RULE, "messages": [ASKED, REPLY]}, ("messages",)
        ),
    ),
    malformed=400,
)
