"""Our own wire format for a reply that is being written: lines of JSON in, lines of JSON out.

    POST /v1/check/stream
        {"messages": […], "rules": […], "every_tokens": 16, "hold_back": 20}   as of /v1/check
        {"append": "That is a "}
        {"append": "migraine.", "end": true}
    answers, while the body is still being sent,
        {"release": "That is", "verdict": "allow", "p_violation": {…}, …}      after every check
        {"release": " a migraine.", "judgement": {…}}                          the last line

What is released was allowed, at its end and beyond: a check that finds a violation ends the stream,
and one that could not judge releases nothing. Both ways are open at once, so the client must read
while it writes; `serve.client` is for clients that cannot. Knows nothing of other formats.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.files.strict_json import in_words
from guard.wrong_values import wrong_values
from serve.api.access import Caller
from serve.api.errors import SERVER_FAILED, engine_failure, log, value_in_words
from serve.api.formats import check
from serve.api.formats.check import CheckRequest, CheckResponse, StrictBody, TokenUsage
from serve.api.input.limits import MAX_CHARACTERS
from serve.api.input.limits import STREAM_PATH as PATH
from serve.api.input.lines import BodyLines
from serve.api.input.strict_json import NOT_UNICODE, TOO_DEEP, TooManyValues, read_body
from serve.api.observe.record import Ending, StreamRecord
from serve.api.service import CheckService, DecidedCheck
from serve.api.wire_format import WireFormat
from serve.engine import Check, Refusal
from serve.engine.codes import Code, code_of
from serve.engine.prompts import CHARACTERS_PER_TOKEN
from serve.engine.refusals import Overloaded
from serve.policy.logic import Decision
from serve.policy.ruling import Ruling

router = APIRouter()

SENTENCE_ENDS = (".", "!", "?", "\n", "\u3002", "\uff01", "\uff1f")  # the last three full-width
LINES = "application/x-ndjson"
WHAT = (
    "Lines of JSON: what `/v1/check` takes with `every_tokens`, `at_sentence_ends` and "
    "`hold_back`; then `append`; at last `end`."
)
SENT = {LINES: {"schema": {"type": "string"}}}
BODY = {
    "requestBody": {"required": True, "description": WHAT, "content": SENT},
    "responses": {"200": {"description": "Lines of JSON", "content": {LINES: {}}}},
}
Line = TypeVar("Line", bound=BaseModel)


class StreamRequest(CheckRequest):
    """The first line: the conversation that is replied to, and when the reply is checked.

    A check is due once `every_tokens` tokens came since the last, and at the end of a sentence. The
    last `hold_back` characters that a check has allowed wait for the next one.
    """

    every_tokens: Annotated[int, Field(ge=1, le=256)] = 16
    at_sentence_ends: bool = True
    hold_back: Annotated[int, Field(ge=0, le=10_000)] = 20


class StreamPiece(StrictBody):
    """A further line: what was written, and whether it is the end."""

    append: str = ""
    end: bool = False


class StreamEvent(BaseModel):
    """The outcome of a check of the reply up to `checked_characters`."""

    release: str
    verdict: Literal["allow", "unjudged"]
    p_violation: dict[str, float]
    unjudged: list[check.UnjudgedRule]
    checked_characters: int
    usage: TokenUsage


class StreamEnd(BaseModel):
    """The last line: what /v1/check says of the whole, or why it says nothing."""

    release: str
    judgement: CheckResponse | dict[str, Any]


class GrowingReply:
    """The reply of a stream so far: how far it was checked, and how far it was released."""

    def __init__(self, opening: StreamRequest) -> None:
        self._opening = opening
        self._messages = opening.conversation
        self._room = MAX_CHARACTERS - sum(len(message.content) for message in self._messages)
        self.is_ended = False
        self.characters = 0
        self._checked = ""  # the text that a check has seen
        self.released = 0  # characters of it
        self._expect_new()

    def _expect_new(self) -> None:
        self._new: list[str] = []  # joined once a check, however many pieces come
        self._new_bytes = 0
        self._ends_sentence = False
        # So many new bytes may have tokens enough for a check: no token has less than one.
        self._count_at_bytes = self._opening.every_tokens

    @property
    def conversation(self) -> tuple[Message, ...]:
        """The messages, and the reply so far; one that has ended may be empty."""
        if not (self.characters or self.is_ended):
            return self._messages
        return (*self._messages, Message("assistant", self._checked + self._unchecked()))

    @property
    def checked_characters(self) -> int:
        return len(self._checked)

    def _unchecked(self) -> str:
        self._new = ["".join(self._new)]
        return self._new[0]

    def take(self, piece: StreamPiece) -> None:
        """Append what was written. Raises HTTPException 422 after the end, 413 for too much."""
        if self.is_ended:
            raise HTTPException(422, 'a line came after {"end": true}')
        try:
            Message("assistant", piece.append)
        except GuardError as error:
            raise HTTPException(422, f"append: {error}") from error
        self._new.append(piece.append)
        self._new_bytes += len(piece.append.encode())
        self._ends_sentence |= any(end in piece.append for end in SENTENCE_ENDS)
        self.characters += len(piece.append)
        self.is_ended = piece.end
        if self.characters > self._room:
            raise HTTPException(413, f"the conversation has more than {MAX_CHARACTERS} characters")

    def is_due(self, service: CheckService) -> bool:
        """Whether it is time for a check. Tokens are counted only where there may be enough."""
        every_tokens = self._opening.every_tokens
        new_characters = self.characters - self.checked_characters
        if new_characters >= CHARACTERS_PER_TOKEN * every_tokens:
            return True
        if self._opening.at_sentence_ends and self._ends_sentence:
            return True
        if self._new_bytes < self._count_at_bytes:
            return False
        try:
            missing_tokens = every_tokens - service.text_tokens(self._unchecked())
        except Overloaded:  # the engine is being started again; by characters it is due later
            return False
        self._count_at_bytes = self._new_bytes + missing_tokens
        return missing_tokens <= 0

    def checked(self, ruling: Ruling) -> str:
        """Note that the whole text so far was checked; the text that may be shown now."""
        self._checked += self._unchecked()
        self._expect_new()
        end = self.checked_characters
        if not self.is_ended:
            end -= self._opening.hold_back
        if ruling is not Ruling.ALLOW or end <= self.released:
            return ""
        text = self._checked[self.released : end]
        self.released = end
        return text


@router.post(PATH, response_model=None, openapi_extra=BODY)
async def check_stream(request: Request) -> Response:
    """Put a reply to the rules while it is being written."""
    lines = BodyLines(request.scope, request.receive)
    try:
        opening = _read(StreamRequest, await lines.next(), "the first line")
        policies = check.asked(opening, request).policies
        Caller.of(request).check_size([GrowingReply(opening).conversation], policies.values())
    except BaseException:
        lines.close()
        raise
    return CheckedStream(request, lines, opening)


class CheckedStream(Response):
    """The response that is sent while the body still comes in. No class of Starlette's: those look
    for the end of the connection where the body is.
    """

    def __init__(self, request: Request, lines: BodyLines, opening: StreamRequest) -> None:
        self.background = None
        self._request = request
        self._service = CheckService.of(request)
        self._lines = lines
        self._opening = opening
        self._reply = GrowingReply(opening)
        self._began_s = time.time()
        self._rule_set = check.asked(opening, request).rule_set
        self._judged = 0  # characters of the reply that a check has judged
        self._ruling = Ruling.UNJUDGED  # the last check's
        self._ending: Ending = "cut_off"  # unless something else ends it
        self._failure: Code | None = None
        self._is_cut = False  # the body, before its end
        self._is_told = False
        self._line_number = 1  # of those that are not empty; the first is the opening
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        # The connection stays open: closed before the body's end it would be reset, and the last
        # line lost.
        self.headers["content-type"] = LINES

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send an event after every check, until the reply ends or may not go on."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for event in self._events():
                body = event.model_dump_json(exclude_none=True).encode() + b"\n"
                await send({"type": "http.response.body", "body": body, "more_body": True})
        finally:
            self._lines.close()
            self._tell(self._ending)
        await send({"type": "http.response.body", "body": b""})

    def _tell(self, ending: Ending) -> None:
        """Tell the observers, once, that the stream is over."""
        if self._is_told:
            return
        self._is_told = True
        caller, reply = Caller.of(self._request), self._reply
        tenant = caller.tenant and caller.tenant.name
        record = StreamRecord(
            request=replace(self._request.scope["facts"], tenant=tenant),
            rule_set=self._rule_set,
            began_s=self._began_s,
            ending=ending,
            failure=self._failure,
            came=reply.characters,
            judged=self._judged,
            released=reply.released,
            ruling=self._ruling,
        )
        self._service.tell_stream(record)

    async def _events(self) -> AsyncIterator[StreamEvent | StreamEnd]:
        """All lines of the answer; whatever fails is the last of them."""
        try:
            async for event in self._checks():
                yield event
        except HTTPException as error:
            yield self._failed(error.detail, code_of(error))
        except GuardError as error:
            if not self._lines.is_gone:
                yield self._failed(engine_failure(error), code_of(error))
        except Exception as error:  # the status was sent long ago
            log.error("a stream failed", exc_info=error)
            yield self._failed(SERVER_FAILED, "engine_failed")

    def _failed(self, message: str, code: Code) -> StreamEnd:
        self._failure = code
        if not self._is_cut:
            self._ending = "failed"
        return StreamEnd(release="", judgement=check.error_body(422, message, code))

    async def _checks(self) -> AsyncIterator[StreamEvent | StreamEnd]:
        reply = self._reply
        decided: DecidedCheck | None = None
        while not reply.is_ended:
            await self._take()
            if reply.is_ended or not reply.is_due(self._service):
                continue
            try:
                decided = await self._check()
            except Overloaded as error:  # a later check reads all that this one would have
                yield self._event("", self._unanswered(error))
                continue
            ruling = decided.decision.ruling
            if ruling is Ruling.VIOLATION:
                self._tell("violation")
                yield self._end("", decided)
                return
            yield self._event(reply.checked(ruling), decided)
        if decided is None or reply.checked_characters < reply.characters:
            decided = await self._check()
        release = reply.checked(decided.decision.ruling)
        self._tell("end")
        yield self._end(release, decided)

    async def _take(self) -> None:
        """Append the next lines that came. Raises HTTPException where the body is cut off."""
        line = await self._lines.next()
        while True:
            self._line_number += 1
            self._is_cut = line is None
            self._reply.take(_read(StreamPiece, line, f"line {self._line_number}"))
            if not self._lines.has_more:
                break
            line = await self._lines.next()
            if line is None:
                break

    async def _check(self) -> DecidedCheck:
        """The check of the reply so far, given up once its sender is gone."""
        scope = {**self._request.scope, "deadline": self._lines.deadline()}
        request = Request(scope, self._lines.until_gone)
        question = check.asked(self._opening, self._request)
        question = replace(question, within=self._opening.conversation)
        decided = await self._service.check(request, self._reply.conversation, question)
        self._ruling = decided.decision.ruling
        if self._ruling is not Ruling.UNJUDGED:
            self._judged = self._reply.characters
        return decided

    def _event(self, release: str, decided: DecidedCheck) -> StreamEvent:
        verdicts = decided.check.verdicts
        return StreamEvent(
            release=release,
            verdict="allow" if decided.decision.ruling is Ruling.ALLOW else "unjudged",
            p_violation={verdict.rule: verdict.p_violation for verdict in verdicts},
            unjudged=check.unjudged_rules(decided.check),
            checked_characters=self._reply.checked_characters,
            usage=TokenUsage.of([decided.check]),
        )

    def _unanswered(self, error: Overloaded) -> DecidedCheck:
        rules = check.asked(self._opening, self._request).rule_set.rules
        refusals = dict.fromkeys(rules, Refusal("the stream", str(error), error.code))
        return DecidedCheck(Check((), refusals, 0, 0, 0.0), Decision(Ruling.UNJUDGED, ()))

    def _end(self, release: str, decided: DecidedCheck) -> StreamEnd:
        judgement = CheckResponse.of(decided, self._opening.rule_set)
        return StreamEnd(release=release, judgement=judgement)


def _read(kind: type[Line], line: bytes | None, where: str) -> Line:
    """The parsed line of the body. Raises HTTPException 422 if it is missing or of another kind."""
    if line is None:
        raise HTTPException(422, f'{where} is missing; the last one is {{"end": true}}')
    try:
        value = read_body(line)
        return kind.model_validate(value)
    except ValidationError as error:
        wrong, *_ = wrong_values(error.errors(), value)
        problem = f": {value_in_words(wrong)}"
    except TooManyValues as error:
        raise HTTPException(413, f"{where} has {error}") from None
    except RecursionError:
        problem = f" is {TOO_DEEP}"
    except UnicodeDecodeError:
        problem = f" is {NOT_UNICODE}"
    except json.JSONDecodeError as error:
        problem = f" is not JSON: {in_words(error)}"
    raise HTTPException(422, f"{where}{problem}")


def _reading(text: str) -> list[str]:
    *_, last = text.strip().splitlines()
    return check.rulings(json.loads(last)["judgement"])


FORMAT = WireFormat(
    router,
    check.error_body,
    _reading,
    requests=tuple(
        replace(example, path=PATH, lines=({"end": True},)) for example in check.FORMAT.requests
    ),
)
