"""The guardrail server: `python -m serve.up`, entry of `make up`. Knows nothing of vLLM; that is the engine's.

    POST /v1/check   {"messages": [{"role", "content"}, …], "rules": ["medical_advice", …]}    default: every rule that is served
    GET  /v1/rules   the rules, their wording and their thresholds
    GET  /health     200 while checks are served, else 503

"Could not judge" is an answer of its own (`unjudged`), per rule and for the whole check, and never an "allow".
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as Received

from guard.errors import GuardError, exits_cleanly
from guard.example import Message
from guard.layout import Runs
from guard.recipe import load_recipe
from guard.verdict import Verdict
from serve.engine import GuardEngine
from serve.engine.adapter import trained
from serve.engine.score import Check
from serve.engine.thread import MAX_OPEN, MAX_QUEUED, TIMEOUT_S, EngineThread, too_late
from serve.merge import MERGED, merged_engine

MAX_TURNS = 10_000  # a turn costs five tokens at least
MAX_RULES = 1_000
MAX_CHARACTERS = 1_000_000  # of a conversation: several times what fits any context, and little enough to tokenise in a second
MAX_BYTES = (
    16 * 2**20
)  # of a request: a conversation as long as may be, with every character escaped
TOO_LARGE = f"the body is too large; the limit is {MAX_BYTES:,} bytes"
MAX_REQUESTS = MAX_OPEN + MAX_QUEUED + 32  # whose bodies are in memory at once
MAX_SALT = 200  # characters
GONE_S = 0.5  # how often it is looked whether the caller still waits

Outcome = Literal["allow", "violation", "unjudged"]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Turn(_Body):
    """One message of the conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str

    @property
    def message(self) -> Message:
        """The turn in the engine's terms. Raises GuardError if its content is not Unicode text."""
        return Message(self.role, self.content)


def _messages(turns: list[Turn]) -> list[Turn]:
    characters = sum(len(turn.content) for turn in turns)
    if characters > MAX_CHARACTERS:
        raise ValueError(
            f"the conversation has {characters} characters; the limit is {MAX_CHARACTERS}"
        )
    for number, turn in enumerate(turns):
        try:
            _ = turn.message
        except GuardError as error:
            raise ValueError(f"turn {number}: {error}") from error
    return turns


def _distinct(rules: list[str] | None) -> list[str] | None:
    if rules is not None and len(set(rules)) < len(rules):
        raise ValueError("a rule is named twice")
    return rules


class Question(_Body):
    """A conversation, and the rules to check it against.

    Conversations of different `cache_salt` share nothing in the cache: give every tenant one, and none learns from the token counts or the
    time of its checks what another one has asked.
    """

    messages: Annotated[
        list[Turn], Field(min_length=1, max_length=MAX_TURNS), AfterValidator(_messages)
    ]
    rules: Annotated[
        list[str] | None, Field(min_length=1, max_length=MAX_RULES), AfterValidator(_distinct)
    ] = None
    cache_salt: Annotated[str | None, Field(min_length=1, max_length=MAX_SALT)] = None


class Result(BaseModel):
    """One rule's verdict; a violation is `p_violation` >= `threshold`. Not `confident`: so near to it that the verdict means little."""

    rule: str
    verdict: Literal["allow", "violation"]
    p_violation: float
    threshold: float
    confident: bool

    @classmethod
    def of(cls, verdict: Verdict) -> Result:
        """The rule's verdict in the server's words."""
        word: Literal["allow", "violation"] = "violation" if verdict.violates else "allow"
        return cls(
            rule=verdict.rule,
            verdict=word,
            p_violation=verdict.p_violation,
            threshold=verdict.threshold,
            confident=verdict.confident,
        )


class Unjudged(BaseModel):
    """A rule without a verdict, and why."""

    rule: str
    reason: str


class Usage(BaseModel):
    """Prompt tokens over all rules: those taken from the cache, and those computed."""

    cached_tokens: int
    computed_tokens: int


class Answer(BaseModel):
    """`verdict` is "violation" if any rule is violated, else "unjudged" if any could not be judged, else "allow"."""

    verdict: Outcome
    results: list[Result]
    unjudged: list[Unjudged]
    usage: Usage
    latency_ms: float

    @classmethod
    def of(cls, check: Check) -> Answer:
        """The engine's check in the server's words."""
        return cls(
            verdict=check.outcome,
            results=[Result.of(verdict) for verdict in check.verdicts],
            unjudged=[
                Unjudged(rule=rule, reason=refusal.why) for rule, refusal in check.refused.items()
            ],
            usage=Usage(cached_tokens=check.cached_tokens, computed_tokens=check.computed_tokens),
            latency_ms=check.wall_ms,
        )


class ServedRule(BaseModel):
    """A rule that is served: its wording in the prompt, its threshold, the weights that answer it."""

    rule: str
    text: str
    threshold: float
    weights_sha256: str


class BoundedBodies:
    """ASGI middleware: a request of more than MAX_BYTES is refused before it is read, or as soon as it turns out to be one.

    So is one that comes while MAX_REQUESTS are under way.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._under_way = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, if there is room for it."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
        elif self._under_way >= MAX_REQUESTS:
            await _unjudged("too many checks are waiting. Try again later", 503)(
                scope, receive, send
            )
        else:
            self._under_way += 1
            try:
                await self._bounded(scope, receive, send)
            finally:
                self._under_way -= 1

    async def _bounded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, with a count of what comes in."""
        read = 0

        async def counted() -> Received:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > MAX_BYTES:
                raise HTTPException(413, TOO_LARGE)
            return message

        stated = dict(scope.get("headers", ())).get(b"content-length", b"")
        if stated.isdigit() and int(stated) > MAX_BYTES:
            await _unjudged(TOO_LARGE, 413)(scope, receive, send)
        else:
            await self._app(scope, counted, send)


def create_app(engine: GuardEngine, timeout_s: float = TIMEOUT_S) -> FastAPI:
    """The server around an engine, which it drives from a thread of its own while it runs, and closes when it stops."""
    rules = [
        ServedRule(
            rule=name,
            text=card.rule_text,
            threshold=card.threshold,
            weights_sha256=card.weights_sha256,
        )
        for name, card in engine.rules.items()
    ]
    names = {rule.rule for rule in rules}
    thread: EngineThread

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        nonlocal thread
        thread = EngineThread(engine, timeout_s)
        yield
        await asyncio.to_thread(thread.close)

    app = FastAPI(
        title="Centurion",
        description="Policy rules, one prefill, one verdict each.",
        lifespan=lifespan,
    )

    app.add_middleware(BoundedBodies)

    @app.post("/v1/check")
    async def check(question: Question, request: Request) -> Answer:
        """Put a conversation to the rules."""
        unknown = [name for name in question.rules or () if name not in names]
        if unknown:  # a misspelt rule is the caller's mistake, like any other in the question
            raise HTTPException(
                422, f"rules: not served: {', '.join(unknown)}; GET /v1/rules lists them"
            )
        messages = [turn.message for turn in question.messages]
        future = thread.check(messages, question.rules, cache_salt=question.cache_salt)
        answered, until = asyncio.wrap_future(future), time.monotonic() + timeout_s + GONE_S
        while not (await asyncio.wait([answered], timeout=GONE_S))[0]:
            is_late = (
                time.monotonic() > until
            )  # the engine itself would have said so, if it were not in the midst of a batch
            if is_late or await request.is_disconnected():
                thread.give_up(future)
            if is_late:
                raise too_late()
        return Answer.of(await answered)

    @app.get("/v1/rules")
    async def served() -> list[ServedRule]:
        """The rules that are served."""
        return rules

    @app.get("/health")
    async def health() -> JSONResponse:
        """Whether checks are served."""
        return JSONResponse(
            {"status": "ok" if thread.is_alive else "down"},
            status_code=200 if thread.is_alive else 503,
        )

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return _unjudged("; ".join(_in_words(problem) for problem in error.errors()), 422)

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        hint = "; GET /docs describes the calls" if error.status_code in (404, 405) else ""
        return _unjudged(f"{error.detail}{hint}", error.status_code, error.headers)

    @app.exception_handler(GuardError)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        # 503 and not 500: gateways apply their own fail mode to an unreachable guardrail, and that is what this is
        return _unjudged(str(error), 503)

    @app.exception_handler(Exception)
    async def broken(_: Request, __: Exception) -> JSONResponse:
        return _unjudged("the server failed; its log says why", 500)

    return app


def _unjudged(error: str, status: int, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse(
        {"verdict": "unjudged", "error": error}, status_code=status, headers=headers
    )


def _in_words(problem: dict[str, Any]) -> str:
    """One of pydantic's errors: where in the question, and what."""
    if problem["type"] == "json_invalid":
        return f"the body is not JSON: {problem['ctx']['error']} at character {problem['loc'][-1]}"
    if len(problem["loc"]) < 2:  # the body as a whole
        return "the body must be a JSON object, sent with `content-type: application/json`"
    return f"{'.'.join(str(part) for part in problem['loc'][1:])}: {problem['msg']}"


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError("more than 0 and finite")
    return seconds


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m serve.up",
        description="Serve every trained aLoRA rule of a base model over HTTP.",
    )
    parser.add_argument(
        "--model", default="tiny", help="a base model of recipes/models (default: %(default)s)"
    )
    parser.add_argument("--rules", help="comma-separated; default: every rule with a trained aLoRA")
    parser.add_argument(
        "--merged",
        action="store_true",
        help="serve one rule, the base that `make merge` has put its LoRA into",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    parser.add_argument(
        "--port",
        type=int,
        default=8000,
        help="port to listen on, 0 for a free one (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=TIMEOUT_S,
        help="seconds that a check may take (default: %(default)g)",
    )
    parser.add_argument(
        "--runs",
        type=Path,
        default=Runs().root,
        help="where the adapters are (default: %(default)s)",
    )
    return parser.parse_args()


@exits_cleanly
def main() -> None:
    """Serve until SIGINT or SIGTERM."""
    arguments = _arguments()
    recipe = load_recipe(arguments.model)
    adapters = trained(
        Runs(arguments.runs), recipe.name, "lora" if arguments.merged else "alora", arguments.rules
    )
    if arguments.merged and len(adapters) > 1:
        raise GuardError(
            "a merged base answers one rule", got=", ".join(adapters), remedy="Name it: RULE="
        )
    with _listening(arguments.host, arguments.port) as listener:
        print(
            f"loading {recipe.name} with {len(adapters)} rules: {', '.join(adapters)}", flush=True
        )
        (folder, *_) = adapters.values()
        with (
            merged_engine(recipe, folder.with_name(MERGED))
            if arguments.merged
            else GuardEngine(recipe, adapters) as engine
        ):
            _warm_up(engine)
            host, port = listener.getsockname()[:2]
            print(
                f"http://{host}:{port}/v1/check is ready; http://{host}:{port}/docs describes it; Ctrl+C stops it",
                flush=True,
            )
            server = uvicorn.Server(
                uvicorn.Config(create_app(engine, arguments.timeout), log_level="warning")
            )
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends it as Ctrl+C does
            with contextlib.suppress(
                KeyboardInterrupt
            ):  # uvicorn raises the signal again after it has shut down
                server.run(sockets=[listener])


def _warm_up(engine: GuardEngine) -> None:
    """Ask every rule once: the first check is many times slower than the next ones. Raises GuardError if one cannot answer."""
    if refused := engine.check([Message("user", "Hello")]).refused:
        rule, refusal = next(iter(refused.items()))
        remedy = f"Train it again (`make train RULE={rule}`), or serve the others with RULE="
        raise GuardError(
            f"{len(refused)} rules cannot be judged; {rule}: {refusal.why}",
            got=", ".join(refused),
            remedy=remedy,
        )


def _listening(host: str, port: int) -> socket.socket:
    """The server's socket, bound before the engine starts: a port in use should not cost the user that wait."""
    try:
        return socket.create_server((host, port), backlog=2048)
    except (OSError, OverflowError) as error:
        raise GuardError(
            f"cannot listen on {host}:{port}: {error}", remedy="Choose another one with PORT="
        ) from error


if __name__ == "__main__":
    main()
