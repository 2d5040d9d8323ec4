"""Signing in with an admin's key, signing out, and the files that pages need."""

from __future__ import annotations

from fastapi import Request, Response
from fastapi.responses import FileResponse
from starlette.exceptions import HTTPException

from serve.console.site import HERE, Console, OpenRoute, Words, done, keep, page, pages, session_id
from serve.tenants.admin import Admin

FILES = ("console.css", "keys.js")
router = pages(OpenRoute)


@router.get("/login")
async def login(request: Request) -> Response:
    return await page(request, "login", problem="")


@router.post("/login")
async def sign_in(request: Request, key: Words) -> Response:
    """Begin a session of the key's owner, under an id that nobody had before."""
    console = Console.of(request)
    owner = console.tenants.keys.owner(key.strip()) if console.tenants else None
    if not isinstance(owner, Admin):
        return await page(request, "login", 403, problem="That is no admin's key.")
    response = done("")
    keep(request, response, console.sessions.begin(owner))
    return response


@router.post("/logout")
async def sign_out(request: Request) -> Response:
    Console.of(request).sessions.end(session_id(request))
    return done("/login")


@router.get("/{path:path}")
async def file(path: str) -> Response:
    """A file, or a page that says that there is nothing."""
    name = path.removeprefix("static/")
    if name not in FILES:
        raise HTTPException(404, "there is no such page")
    return FileResponse(HERE / "static" / name)
