"""The queue of kept checks, one rule of one conversation after the other, for people to label."""

from __future__ import annotations

from typing import Annotated

from fastapi import Form, Request, Response
from pydantic import Field
from starlette.exceptions import HTTPException

from serve.api import reviews
from serve.api.access import Caller, acting
from serve.api.formats.check import explanations
from serve.api.input.limits import MAX_TURNS
from serve.api.service import CheckService, Question
from serve.console.site import Console, Words, done, page, pages
from serve.registry.reviews import Label, QueuedReview, ReviewStore

router = pages()

Skip = Annotated[int, Field(ge=0, le=10_000)]
Skipped = Annotated[Skip, Form()]


@router.get("/reviews")
async def review(request: Request, skip: Skip = 0) -> Response:
    return await _page(request, skip)


@router.post("/reviews")
async def vote(
    request: Request,
    request_id: Words,
    conversation: Words,
    rule: Words,
    label: Annotated[Label, Form()],
    skip: Skipped,
) -> Response:
    """Count the label, and show what follows."""
    reviewer = acting(request, "reviewer")
    body = reviews.FeedbackRequest(
        request_id=request_id, rule=rule, reviewer=reviewer, conversation=conversation, label=label
    )
    await reviews.label(body, request)
    Console.of(request).voted[reviewer].append(body)
    return done(f"/reviews?skip={skip}")


@router.post("/reviews/undo")
async def undo(request: Request, skip: Skipped) -> Response:
    """Take back the reviewer's last label; further ones, if it is asked again."""
    if voted := Console.of(request).voted[acting(request, "reviewer")]:
        last = voted.pop()
        try:
            await reviews.withdraw(last, request)
        except HTTPException as error:
            if error.status_code == 503:  # the store failed, and has the label still
                voted.append(last)
            raise
    return done(f"/reviews?skip={skip}")


@router.post("/reviews/explain")
async def explain(request: Request, conversation: Words, skip: Skipped) -> Response:
    """Mark the turn that carries the violation, by the version that is served now."""
    item = await _queued(request, skip)
    if item is None or item.conversation != conversation or item.messages is None:
        raise HTTPException(409, "the queue has moved on: load it again")
    if len(item.messages) > MAX_TURNS:
        raise HTTPException(422, f"at most {MAX_TURNS} turns can be explained")
    rule_set = Caller.of(request).catalogue.selected([item.rule])
    question = Question(rule_set, purpose="explanation", within=item.messages)
    decided = await CheckService.of(request).check(request, item.messages, question)
    explained = await explanations(request, decided, question, item.messages)
    marked = -1
    if item.rule in explained:
        marked = explained[item.rule].turn
    return await _page(request, skip, marked)


async def _page(request: Request, skip: int, marked: int | None = None) -> Response:
    """What waits, with the `marked` turn, once somebody asked for it. -1: none is."""
    return await page(
        request,
        "reviews",
        item=await _queued(request, skip),
        skip=skip,
        marked=-1 if marked is None else marked,
        is_explained=marked is not None,
        progress=await reviews.answered(request, ReviewStore.progress),
        voted=len(Console.of(request).voted[acting(request, "reviewer")]),
        served=CheckService.of(request).cards,
    )


async def _queued(request: Request, skip: int) -> QueuedReview | None:
    """What waits behind as many as the reviewer skips."""
    asked = (acting(request, "reviewer"), None, 1, skip)
    queue = await reviews.answered(request, ReviewStore.queue, *asked)
    return queue[0] if queue else None
