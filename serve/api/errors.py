"""How an error is worded: in the body of the wire format whose route was called.

Knows nothing of what a format says when there is no error. No error ever reads as "allow": whatever
fails has a status of 400 or more.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Scope

from guard.errors import GuardError
from guard.files.strict_json import place
from guard.wrong_values import WrongValue, wrong_values
from serve.api.input.limits import route_path
from serve.api.observe.requests import REQUEST_ID
from serve.api.wire_format import WireFormat, format_of
from serve.engine.codes import Code, code_of, code_of_status
from serve.engine.refusals import CallerGone, Overloaded, TooLate

log = logging.getLogger(__name__)

SERVER_FAILED = "the server failed; its log says why"
NO_SUCH_CALL = ("Not Found", "Method Not Allowed")  # in Starlette's words
NAMED_PROBLEMS = 5  # problems of one body that are named; the rest are counted


class Unjudged(HTTPException):
    """The answer to a check whose format has no word for "unjudged" beside its verdicts.

    The status is 422 and not 503: gateways may be told to let pass what an unreachable guardrail
    did not see, and a conversation that nobody can judge must not be a way to get there.
    """

    def __init__(self, reason: str, code: Code) -> None:
        self.reason = reason
        self.code = code
        super().__init__(422, f"could not be judged: {reason}")


class Undecided(HTTPException):
    """What the registry refuses of a decision. Without the places on this machine that it names."""

    def __init__(self, error: GuardError) -> None:
        super().__init__(409, str(GuardError(error.problem, got=error.got, remedy=error.remedy)))


class ErrorResponses:
    """Responses without a verdict, each in the format of its path; for others in `fallback`."""

    def __init__(self, formats: Mapping[str, WireFormat], fallback: WireFormat) -> None:
        self._formats = formats
        self._fallback = fallback

    def response(
        self,
        scope: Scope,
        status: int,
        message: str,
        headers: Mapping[str, str] | None = None,
        code: Code | None = None,
    ) -> JSONResponse:
        """The response that says `message` with this HTTP status, which implies a `code`."""
        # A caller may have sent text that is not valid Unicode.
        words = message.encode("utf-8", "backslashreplace").decode()
        body = self._format_of(scope).error_body(status, words, code or code_of_status(status))
        return JSONResponse(body, status_code=status, headers=headers)

    def refusal(self, scope: Scope, error: HTTPException) -> JSONResponse:
        return self.response(scope, error.status_code, error.detail, error.headers, code_of(error))

    def name_of(self, scope: Scope) -> str:
        """The name of the format with a route of this path; "none" if no format has one."""
        return format_of(self._formats, route_path(scope)) or "none"

    def handle_all(self, app: FastAPI) -> None:
        app.add_exception_handler(RequestValidationError, self._malformed)
        app.add_exception_handler(HTTPException, self._refused)
        app.add_exception_handler(GuardError, self._failed)
        app.add_exception_handler(Exception, self._broken)

    def _format_of(self, scope: Scope) -> WireFormat:
        return self._formats.get(self.name_of(scope), self._fallback)

    async def _malformed(self, request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        problems = _problems(error)
        if len(problems) > NAMED_PROBLEMS:
            problems[NAMED_PROBLEMS:] = [f"and {len(problems) - NAMED_PROBLEMS} more"]
        status = self._format_of(request.scope).malformed
        return self.response(request.scope, status, "; ".join(problems))

    async def _refused(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message, headers = error.detail, error.headers
        if error.status_code == 405:
            headers = {"allow": _allowed_methods(request)}  # Starlette names those of one route
            if request.method == "OPTIONS":
                return Response(status_code=204, headers=headers)
        if message in NO_SUCH_CALL:
            message += "; GET /docs describes the calls"
        return self.response(request.scope, error.status_code, message, headers, code_of(error))

    async def _failed(self, request: Request, error: Exception) -> JSONResponse:
        headers = {"x-should-retry": "false"}  # otherwise OpenAI's SDKs retry by themselves
        if math.isfinite(after_s := retry_after_s(error)):
            headers = {"retry-after": str(math.ceil(after_s))}
        # 503 and not 500: gateways apply their own fail mode to an unreachable guardrail, and that
        # is what this is.
        return self.response(request.scope, 503, engine_failure(error), headers, code_of(error))

    async def _broken(self, request: Request, _: Exception) -> JSONResponse:
        # Starlette sends this one past the middleware that names all others, and uvicorn closes
        # the connection behind it: a client that is not told would send its next request there.
        headers = {REQUEST_ID: request.scope["facts"].request_id, "connection": "close"}
        return self.response(request.scope, 500, SERVER_FAILED, headers)


def retry_after_s(error: Exception) -> float:
    """The seconds after which a check that was refused for lack of room may be tried again.

    Infinite for one that was begun, or may have been: what has just killed an engine, or held it up
    for long, would do so again.
    """
    if isinstance(error, Overloaded) and not isinstance(error, TooLate):
        return error.retry_after_s
    return math.inf


def engine_failure(error: Exception) -> str:
    """The text of the engine's error for a caller; the rest is for the log."""
    if isinstance(error, Overloaded | CallerGone):
        return str(error)
    # Its text is for whoever runs the server: it may name paths, versions, library messages.
    if error.__cause__ is None:  # else the engine's thread has logged what that was
        log.error("a check failed", exc_info=error)
    return "the engine failed; the server's log says why"


def _problems(error: RequestValidationError) -> list[str]:
    """What is wrong with a request: where in the body or its head, and what."""
    words: list[str] = []
    of_body: list[dict[str, Any]] = []
    for problem in error.errors():
        part, *location = problem["loc"]
        inside = problem | {"loc": location}
        if problem["type"] == "json_invalid":
            where = f"character {location[-1]} ({place(error.body, location[-1])})"
            words.append(f"the body is not JSON: {problem['ctx']['error']} at {where}")
        elif part != "body":  # a header, the query or the path
            (value,) = wrong_values([inside], {location[0]: problem["input"]})
            words.append(f"{part} {value}")
        elif location or problem["type"] == "value_error":
            of_body.append(inside)
        else:
            kind = "sent with `content-type: application/json`"
            words.append(f"the body must be a JSON object, {kind}")
    return words + [value_in_words(value) for value in wrong_values(of_body, error.body)]


def value_in_words(value: WrongValue) -> str:
    if value.kind == "extra_forbidden":
        return f"{value.key}: there is no such key; GET /docs lists the known ones"
    return str(value)


def _allowed_methods(request: Request) -> str:
    """The value of `Allow` for the request's path: the methods of all its routes."""
    methods = {"OPTIONS"}
    for route in request.app.routes:
        if route.matches(request.scope)[0] != Match.NONE:
            methods |= getattr(route, "methods", None) or set()
    if "GET" in methods:
        methods.add("HEAD")
    return ", ".join(sorted(methods))
