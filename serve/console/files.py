"""What other stages have written: a version's card, the quality table, and replays."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from fastapi import Request, Response
from starlette.exceptions import HTTPException

from guard.errors import GuardError
from guard.weights.card import read_card
from serve.console.site import Console, page, pages
from serve.registry.registry import SHORTEST_ID, Registry, Version
from serve.scan.replay import REPORT, Texts, excerpts

router = pages()


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
    files = sorted(Console.of(request).runs.root.glob(f"*/{REPORT}"))
    return await page(request, "replays", names=[file.parent.name for file in files])


@router.get("/replays/{name}")
async def replay(name: str, request: Request) -> Response:
    """Which verdicts flip between two versions, with the ends of the conversations."""
    report = await asyncio.to_thread(_read, Console.of(request).runs.root / name / REPORT)
    if not report:
        raise HTTPException(404, "there is no such replay")
    texts = await asyncio.to_thread(_texts, report)
    return await page(request, "replay", name=name, report=report, texts=texts)


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


def _texts(report: dict[str, Any]) -> Texts:
    """The ends of the conversations; none where a source is no longer there."""
    places: list[tuple[str, int]] = []
    for rule in report["rules"].values():
        places += [(flip["source"], flip["row"]) for flip in rule["flipped"]]
    try:
        return excerpts(places)
    except (GuardError, OSError):
        return {}
