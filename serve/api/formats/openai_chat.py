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
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from guard.prompt.decoder import NO, YES
from guard.verdict import Verdict
from serve.api.access import Caller
from serve.api.formats.conversation import ChatMessages, from_chat
from serve.api.formats.known_keys import NoHiddenWords
from serve.api.formats.openai_error import MALFORMED, error_body
from serve.api.input.limits import MAX_SALT, MAX_TOOLS
from serve.api.input.strict_json import StrictRoute
from serve.api.service import CheckService
from serve.engine import Check

__all__ = ["MALFORMED", "error_body", "router"]

router = APIRouter(route_class=StrictRoute)
MAX_CHOICES = 128
LEAST_LOGPROB = -9999.0  # OpenAI's value for a very unlikely token
STARTED = int(time.time())

# Parameters of the API that steer how text is generated, and change no verdict.
WITHOUT_EFFECT = (
    "frequency_penalty",
    "function_call",
    "metadata",
    "parallel_tool_calls",
    "presence_penalty",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "reasoning_effort",
    "safety_identifier",
    "seed",
    "service_tier",
    "stop",
    "store",
    "temperature",
    "tool_choice",
    "top_p",
    "user",
    "verbosity",
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


class WordLogprob(BaseModel):
    """A word that the answer could have been, and its log-probability in nats."""

    token: str
    logprob: float
    bytes: list[int]

    @classmethod
    def of(cls, word: str, p: float) -> WordLogprob:
        """The word with the probability `p`."""
        logprob = LEAST_LOGPROB
        if p > 0:
            logprob = math.log(p)
        return cls(token=word, logprob=logprob, bytes=list(word.encode()))


class TokenLogprob(WordLogprob):
    """The answer's token, and the likeliest words in its place."""

    top_logprobs: list[WordLogprob]


class AnswerLogprobs(BaseModel):
    """The log-probabilities of an answer, which has one token."""

    content: list[TokenLogprob]
    refusal: None = None


class AnswerMessage(BaseModel):
    """The answer: "yes" if the rule is violated, else "no"."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class CompletionChoice(BaseModel):
    """One answer. Where `n` asks for several, they are all the same."""

    index: int
    message: AnswerMessage
    logprobs: AnswerLogprobs | None
    finish_reason: Literal["stop"] = "stop"


class CachedTokens(BaseModel):
    """The prompt tokens that were not computed again."""

    cached_tokens: int


class CompletionUsage(BaseModel):
    """The tokens of the prompt and of the answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens

    @classmethod
    def of(cls, check: Check, choices: int) -> CompletionUsage:
        """The tokens of the check, and one token per choice."""
        prompt_tokens = check.cached_tokens + check.computed_tokens
        return cls(
            prompt_tokens=prompt_tokens,
            completion_tokens=choices,
            total_tokens=prompt_tokens + choices,
            prompt_tokens_details=CachedTokens(cached_tokens=check.cached_tokens),
        )


class ChatCompletion(BaseModel):
    """A verdict as a completion; `system_fingerprint` names the weights that gave it."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: CompletionUsage


class RuleModel(BaseModel):
    """A rule that is served, as a model; `created` is when the server started, in Unix seconds."""

    id: str
    object: Literal["model"] = "model"
    created: int = STARTED
    owned_by: str = "centurion"


class RuleModels(BaseModel):
    """The rules that are served."""

    object: Literal["list"] = "list"
    data: list[RuleModel]


@router.post("/v1/chat/completions", response_model=ChatCompletion)
async def complete(
    body: ChatCompletionRequest, request: Request
) -> ChatCompletion | StreamingResponse:
    """Put a conversation to the rule that is called like the model."""
    _refuse_contradictions(body)
    rule_set = Caller.of(request).catalogue.selected([body.model])
    conversation = from_chat(body.messages, [*(body.tools or ()), *(body.functions or ())])
    ((check, _),) = await CheckService.of(request).judge_each(
        request, [conversation], rule_set, cache_salt=body.cache_salt
    )
    choices = _choices(check.verdicts[0], body)
    completion = ChatCompletion(
        id=f"chatcmpl-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=body.model,
        system_fingerprint=f"fp_{check.versions[body.model][:12]}",
        choices=choices,
        usage=CompletionUsage.of(check, len(choices)),
    )
    if body.stream:
        options = body.stream_options or StreamOptions()
        events = _events(completion, include_usage=options.include_usage)
        return StreamingResponse(events, media_type="text/event-stream")
    return completion


@router.get("/v1/models")
async def models(request: Request) -> RuleModels:
    """The rules that are served, as models."""
    return RuleModels(data=[RuleModel(id=rule) for rule in Caller.of(request).catalogue.rules])


@router.get("/v1/models/{model}")
async def model(model: str, request: Request) -> RuleModel:
    """One rule, as a model."""
    Caller.of(request).catalogue.card(model)
    return RuleModel(id=model)


def _refuse_contradictions(body: ChatCompletionRequest) -> None:
    """Raise HTTPException 400 for parameters that the API does not have, or not together."""
    for name in body.model_extra or ():
        if name not in WITHOUT_EFFECT:
            raise HTTPException(MALFORMED, f"Unrecognized request argument supplied: {name}")
    if body.top_logprobs is not None and not body.logprobs:
        raise HTTPException(MALFORMED, "top_logprobs needs logprobs to be true")
    if body.stream_options is not None and not body.stream:
        raise HTTPException(MALFORMED, "stream_options needs stream to be true")


def _choices(verdict: Verdict, body: ChatCompletionRequest) -> list[CompletionChoice]:
    """The verdict as the answer, as often as it was asked for."""
    answer = AnswerMessage(content=YES if verdict.violates else NO)
    logprobs = None
    if body.logprobs:
        logprobs = _logprobs(verdict, answer.content, body.top_logprobs or 0)
    count = body.n or 1
    return [
        CompletionChoice(index=index, message=answer, logprobs=logprobs) for index in range(count)
    ]


def _logprobs(verdict: Verdict, answer: str, alternatives: int) -> AnswerLogprobs:
    words = {
        YES: WordLogprob.of(YES, verdict.p_violation),
        NO: WordLogprob.of(NO, 1 - verdict.p_violation),
    }
    likeliest = sorted(words.values(), key=lambda word: -word.logprob)[:alternatives]
    token = TokenLogprob(**words[answer].model_dump(), top_logprobs=likeliest)
    return AnswerLogprobs(content=[token])


def _events(completion: ChatCompletion, *, include_usage: bool) -> Iterator[str]:
    """The completion as server-sent events: the answer, how it ended, and what was asked for."""
    chunk: dict[str, Any] = {
        "id": completion.id,
        "object": "chat.completion.chunk",
        "created": completion.created,
        "model": completion.model,
        "system_fingerprint": completion.system_fingerprint,
    }
    for choice in completion.choices:
        answer = choice.model_dump(include={"index", "logprobs"})
        answer |= {"delta": choice.message.model_dump(), "finish_reason": None}
        yield _event(chunk | {"choices": [answer]})
        end = {"index": choice.index, "delta": {}, "logprobs": None, "finish_reason": "stop"}
        yield _event(chunk | {"choices": [end]})
    if include_usage:
        yield _event(chunk | {"choices": [], "usage": completion.usage.model_dump()})
    yield "data: [DONE]\n\n"


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"
