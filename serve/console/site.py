"""What all pages have in common: who asks, the token of every form, the headers of every answer,
errors as pages, and templates. Knows no page.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Self

from fastapi import Form, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse
from fastapi.routing import APIRoute, APIRouter
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from guard.errors import GuardError
from guard.layout import Runs
from serve.api.access import Caller
from serve.api.input.limits import CONSOLE_PATH
from serve.api.reviews import ReviewerOfRequest
from serve.registry.registry import Registry, user_name
from serve.tenants.admin import Admin
from serve.tenants.sessions import LONGEST_S, Sessions
from serve.tenants.tenant_file import Tenants

HERE = Path(__file__).parent
LOGIN = f"{CONSOLE_PATH}/login"
MOST_UNDONE = 100  # labels of an admin
COOKIE, TOKEN = "centurion_console", "token"
HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'self'; script-src 'self'; "
    "img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
}
TEMPLATES = Environment(
    loader=FileSystemLoader(HERE / "templates"),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)

Handler = Callable[[Request], Coroutine[Any, Any, Response]]
Words = Annotated[str, Form(max_length=1000)]


@dataclass(frozen=True)
class Console:
    """What the pages are made of."""

    runs: Runs
    registry: Registry
    tenants: Tenants | None
    sessions: Sessions = field(default_factory=Sessions)
    since: datetime = field(default_factory=lambda: datetime.now(UTC))
    # What each admin has voted on last, for taking it back.
    voted: defaultdict[str, deque[ReviewerOfRequest]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=MOST_UNDONE))
    )

    @classmethod
    def of(cls, request: Request) -> Self:
        console: Self = request.app.state.console
        return console

    def admin(self, request: Request) -> Admin | None:
        """Who asks; None for nobody who is known. Without tenants it is whoever is on this machine:
        nobody else came here.
        """
        if self.tenants is not None:
            return self.sessions.admin(session_id(request))
        return Admin(user_name(), "publisher")


class ConsoleRoute(APIRoute):
    """A page for those who are signed in. A form must carry its token. What is raised becomes a
    page too.
    """

    is_open = False

    def get_route_handler(self) -> Handler:
        handle = super().get_route_handler()

        async def handle_page(request: Request) -> Response:
            try:
                admin = None if self.is_open else Console.of(request).admin(request)
                request.scope["caller"] = Caller(Caller.of(request).catalogue, admin=admin)
                response: Response = RedirectResponse(LOGIN, 303)
                if self.is_open or admin:
                    if request.method == "POST":  # read from nobody unknown: they may be slow
                        await _check_token(request)
                    response = await handle(request)
            except (RequestValidationError, ValidationError) as error:
                names = [str(problem["loc"][-1]) for problem in error.errors()]
                response = await _refusal(request, 422, f"missing or wrong: {', '.join(names)}")
            except HTTPException as error:
                response = await _refusal(request, error.status_code, error.detail)
            except GuardError as error:
                response = await _refusal(request, 409, f"{error.problem}. {error.remedy or ''}")
            for name, value in HEADERS.items():
                response.headers.setdefault(name, value)
            return response

        return handle_page


class OpenRoute(ConsoleRoute):
    """What whoever is not signed in may ask too."""

    is_open = True


def pages(route_class: type[ConsoleRoute] = ConsoleRoute) -> APIRouter:
    """A router of pages, which no description of the API has."""
    return APIRouter(prefix=CONSOLE_PATH, route_class=route_class, include_in_schema=False)


async def _check_token(request: Request) -> None:
    token = str((await request.form()).get(TOKEN))
    if not Console.of(request).sessions.is_token(session_id(request), token):
        raise HTTPException(403, "the form is not of this session: load its page again")


def session_id(request: Request) -> str:
    """The id in the request's cookie, or else the one that its answer sets."""
    if "session" not in request.scope:
        request.scope["session"] = request.cookies.get(COOKIE) or secrets.token_urlsafe(32)
    named: str = request.scope["session"]
    return named


def keep(request: Request, response: Response, session: str) -> None:
    """Have the browser send this session's id from now on."""
    response.set_cookie(
        COOKIE,
        session,
        max_age=int(LONGEST_S),
        path=CONSOLE_PATH,
        secure="https" in (request.url.scheme, request.headers.get("x-forwarded-proto")),
        httponly=True,
        samesite="strict",
    )


def done(path: str) -> RedirectResponse:
    """What a form that was carried out leads to: a page that may be loaded again."""
    return RedirectResponse(CONSOLE_PATH + path, 303)


async def page(
    request: Request, template: str, status: int = 200, **values: object
) -> HTMLResponse:
    """A template's page for who asks, made beside the event loop, which has checks to answer."""
    console, session = Console.of(request), session_id(request)
    html = await asyncio.to_thread(
        TEMPLATES.get_template(f"{template}.html.jinja").render,
        admin=Caller.of(request).admin,
        has_login=console.tenants is not None,
        token=console.sessions.token(session),
        path=request.url.path,
        **values,
    )
    response = HTMLResponse(html, status)
    if request.cookies.get(COOKIE) != session:
        keep(request, response, session)
    return response


async def _refusal(request: Request, status: int, problem: str) -> HTMLResponse:
    return await page(request, "refusal", status, problem=problem)
