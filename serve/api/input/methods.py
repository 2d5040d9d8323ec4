"""HTTP's methods beside those that a route has: HEAD where there is GET, and which there are."""

from __future__ import annotations

from fastapi import Request
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send


class HeadAsGet:
    """ASGI middleware that has HEAD answered as GET; the server leaves the body out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


def allowed_methods(request: Request) -> str:
    """The value of `Allow` for the request's path: the methods of all its routes."""
    methods = {"OPTIONS"}
    for route in request.app.routes:
        if route.matches(request.scope)[0] != Match.NONE:
            methods |= getattr(route, "methods", None) or set()
    if "GET" in methods:
        methods.add("HEAD")
    return ", ".join(sorted(methods))
