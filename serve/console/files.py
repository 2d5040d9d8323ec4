"""What other stages have written: a version's card, the quality table, and replays."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from fastapi import Request, Response
from fastapi.responses import FileResponse
from starlette.exceptions import HTTPException

from guard.weights.card import read_card
from serve.api.access import acting
from serve.console.site import Console, page, pages
from serve.registry.registry import SHORTEST_ID, Registry, Version
from serve.scan.replay import PAGE

router = pages()

# Of a page with styles of its own, which quotes conversations.
WRITTEN = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"


@router.get("/versions/{version_id}")
async def version(version_id: str, request: Request) -> Response:
    """What a version answers, how well, and what it was made from."""
    console = Console.of(request)
    named = await asyncio.to_thread(_named, console.registry, version_id)
    card = await asyncio.to_thread(read_card, named.folder)
    report = await asyncio.to_thread(_read, console.runs.report)
    methods = {}
    if report.get("model") == card.model:
        methods = report.get("rules", {}).get(card.rule, {}).get("methods", {})
    return await page(request, "version", version=named, card=card, methods=methods)


@router.get("/replays")
async def replays(request: Request) -> Response:
    acting(request, "reviewer")
    return await page(request, "replays", names=sorted(_replays(request)))


@router.get("/replays/{name}")
async def replay(name: str, request: Request) -> Response:
    """Which verdicts flip between two versions, as `make replay` wrote it."""
    acting(request, "reviewer")
    file = _replays(request).get(name)
    if file is None:
        raise HTTPException(404, "there is no such replay")
    return FileResponse(file, headers={"content-security-policy": WRITTEN})


def _replays(request: Request) -> dict[str, Path]:
    root = Console.of(request).runs.root
    return {file.parent.name: file for file in root.glob(f"*/{PAGE}")}


def _named(registry: Registry, version_id: str) -> Version:
    """The version whose id begins so. Raises HTTPException 404 for none, and for several."""
    named: list[Version] = []
    for rule in registry.rules():
        versions = registry.versions(rule)
        named += [version for version in versions if version.id.startswith(version_id)]
    if len(version_id) < SHORTEST_ID or len(named) != 1:
        raise HTTPException(404, "no version, or not a single one, has an id that begins so")
    return named[0]


def _read(file: Path) -> dict[str, Any]:
    """The JSON of a file; empty where there is none."""
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content
