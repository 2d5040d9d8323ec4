"""The FMS Detectors API, which guardrail orchestrators call: a rule is a detector.

    POST /api/v1/text/contents      {"contents": ["..."]}             each text by itself
    POST /api/v1/text/chat          {"messages": [...]}               OpenAI's messages, and "tools"
    POST /api/v1/text/generation    {"prompt", "generated_text"}      one question, one answer
    POST /api/v1/text/context/doc   {"content", "context_type", "context": ["..."]}

The rule is the header `detector-id`; for clients that send none it is the query `detector_id`, or
it stands before the path: `/medical_advice/api/v1/text/chat`, so that the rule is part of a base
URL. An answer lists a detection for what the rule's card calls a violation and nothing else, since
clients block on any detection. What has no verdict is an error. Specification:
https://github.com/foundation-model-stack/fms-guardrails-orchestrator
(docs/api/openapi_detector_api.yaml). Knows nothing of other formats.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Depends, Header, Request
from pydantic import Field
from starlette.exceptions import HTTPException

from guard.conversation import keys
from guard.conversation.chat import ChatMessage
from guard.conversation.example import Message
from guard.verdict import Verdict
from serve.api.access import Caller
from serve.api.errors import Unjudged
from serve.api.formats.conversation import ChatMessages, NoHiddenWords, from_chat, from_texts
from serve.api.input.limits import MAX_MESSAGES, MAX_TEXTS, MAX_TOOLS
from serve.api.input.strict_json import StrictRoute
from serve.api.service import CheckService, Question
from serve.api.wire_format import ASKED, REPLY, RULE, ExampleRequest, WireFormat, any_flagged
from serve.engine.codes import Code

router = APIRouter(route_class=StrictRoute)


def _rule(
    request: Request,
    detector_id: str | None = None,  # of the path where it is part of it, else of the query
    detector_id_header: Annotated[str | None, Header(alias="detector-id")] = None,
) -> str:
    """The name of the rule. Raises HTTPException 422 if the request has none, or several."""
    names: set[str] = set()
    in_query = request.query_params.getlist("detector_id")
    for named in (detector_id, *in_query, detector_id_header):
        if named:  # a client may append its query to a URL that has it already
            names.add(named.partition("?")[0])
    if len(names) > 1:
        raise HTTPException(422, "the path, the query and the header name different detectors")
    if not names:
        ways = "the header detector-id, ?detector_id= or /{rule} in front of the path"
        raise HTTPException(422, f"no detector: name it by {ways}")
    return names.pop()


Rule = Annotated[str, Depends(_rule)]
Detection = dict[str, Any]  # as the API has it


class DetectorRequest(NoHiddenWords):
    """What is put to a detector. A client's parameters, such as its threshold, say nothing."""

    silent_keys: ClassVar[keys.Shapes] = {"detector_params": keys.ANYTHING}


class ContentsRequest(DetectorRequest):
    """Texts, each checked by itself as a message of the user's."""

    contents: Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS)]


class ChatRequest(DetectorRequest):
    """A conversation, and the tools that the model may call, as OpenAI's API describes them."""

    messages: ChatMessages
    tools: Annotated[list[dict[str, Any]] | None, Field(max_length=MAX_TOOLS)] = None


class GenerationRequest(DetectorRequest):
    """What a user asked and what was generated for it."""

    prompt: str
    generated_text: str


class ContextRequest(DetectorRequest):
    """A text of the assistant's, and the documents that it is about: each what a tool returned."""

    content: str
    context_type: Literal["docs", "document", "chunks", "url"]
    context: Annotated[list[str], Field(min_length=1, max_length=MAX_MESSAGES - 1)]


@router.post("/api/v1/text/contents")
@router.post("/{detector_id}/api/v1/text/contents")
async def contents(body: ContentsRequest, rule: Rule, request: Request) -> list[list[Detection]]:
    """Put each text to the rule: a list of detections a text, empty where there is none."""
    texts = from_texts(body.contents, "contents")
    located = await _judge(request, rule, texts)
    for text, detections in zip(body.contents, located, strict=True):
        for detection in detections:  # in all of it
            detection |= {"start": 0, "end": len(text), "text": text}
    return located


@router.post("/api/v1/text/chat")
@router.post("/{detector_id}/api/v1/text/chat")
async def chat(body: ChatRequest, rule: Rule, request: Request) -> list[Detection]:
    """Put a conversation to the rule."""
    return (await _judge(request, rule, [from_chat(body.messages, body.tools or ())]))[0]


@router.post("/api/v1/text/generation")
@router.post("/{detector_id}/api/v1/text/generation")
async def generation(body: GenerationRequest, rule: Rule, request: Request) -> list[Detection]:
    """Put a question and its answer to the rule."""
    question = ChatMessage(role="user", content=body.prompt)
    answer = ChatMessage(role="assistant", content=body.generated_text)
    return (await _judge(request, rule, [from_chat([question, answer])]))[0]


@router.post("/api/v1/text/context/doc")
@router.post("/{detector_id}/api/v1/text/context/doc")
async def context_doc(body: ContextRequest, rule: Rule, request: Request) -> list[Detection]:
    """Put an answer and the documents that it should follow from to the rule."""
    if body.context_type == "url":
        raise Unjudged("documents are not fetched from a URL; send their text", "unread_content")
    messages = [ChatMessage(role="tool", content=document) for document in body.context]
    messages.append(ChatMessage(role="assistant", content=body.content))
    return (await _judge(request, rule, [from_chat(messages)]))[0]


def error_body(status: int, message: str, code: Code) -> dict[str, Any]:
    """The API's error: its status again, as `code`, and why; ours is the `reason`."""
    return {"code": status, "message": message, "reason": code}


async def _judge(
    request: Request, rule: str, conversations: Sequence[Sequence[Message]]
) -> list[list[Detection]]:
    question = Question(Caller.of(request).catalogue.selected([rule]))
    detections = []
    for check, _ in await CheckService.of(request).judge_each(request, conversations, question):
        version = check.versions.get(rule, "")
        violating = [verdict for verdict in check.verdicts if verdict.violates]
        detections.append([_detection(verdict, version) for verdict in violating])
    return detections


def _detection(verdict: Verdict, version: str) -> Detection:
    """A rule that is violated; `score` is the calibrated probability of it."""
    stated = {"threshold": verdict.threshold, "confident": verdict.confident}
    return {
        "detection": "violation",
        "detection_type": verdict.rule,
        "detector_id": verdict.rule,
        "score": verdict.p_violation,
        "metadata": {**stated, "version": version, "by": verdict.by},
    }


def _reading(text: str) -> list[str]:
    """An empty list is an allow: of one text among several, or of all that was sent."""
    return any_flagged(map(bool, json.loads(text)))


_TEXT = "/api/v1/text"
_NAMED = {"detector-id": RULE}
_CONTENTS = {"contents": [REPLY["content"]]}
_GENERATED = {"prompt": ASKED["content"], "generated_text": REPLY["content"]}
_DOCUMENTS = {"content": REPLY["content"], "context_type": "docs", "context": [ASKED["content"]]}

FORMAT = WireFormat(
    router,
    error_body,
    _reading,
    requests=(
        ExampleRequest(f"/{RULE}{_TEXT}/chat", {"messages": [ASKED, REPLY]}, ("messages",)),
        ExampleRequest(f"{_TEXT}/contents", _CONTENTS, ("contents",), _NAMED),
        ExampleRequest(f"{_TEXT}/generation", _GENERATED, ("prompt",), _NAMED),
        ExampleRequest(f"{_TEXT}/context/doc", _DOCUMENTS, ("context",), _NAMED),
    ),
)
