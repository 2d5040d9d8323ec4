"""What reviewers say of checks, and what they are shown.

POST   /v1/feedback                      {"request_id", "rule", "label", "reviewer", …}
DELETE /v1/feedback?request_id=&rule=&reviewer=    takes that back
GET    /admin/reviews?reviewer=&rule=&limit=       what is to be labelled, with its content
DELETE /admin/reviews/{conversation}               deletes what is kept of a conversation
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from guard.conversation.chat import says_nothing
from guard.errors import GuardError
from serve.api.access import FEEDBACK, Caller, acting
from serve.api.formats.check import MessageBody, StrictBody
from serve.api.formats.conversation import from_chat
from serve.api.input.limits import MAX_MESSAGES
from serve.api.input.strict_json import StrictRoute
from serve.api.keeping import Answer
from serve.api.service import CheckService
from serve.api.session import SESSION_HEADER, conversation_key
from serve.registry.reviews import (
    KeptCheck,
    Label,
    NotKept,
    QueuedReview,
    Reviewed,
    ReviewStore,
    Tally,
    VoteRefused,
)

log = logging.getLogger(__name__)

router = APIRouter(route_class=StrictRoute)
OFF = "nothing is kept for review; `make up REVIEWS=policy.yaml` turns that on"
TENANT = "tenant:"
Name = Annotated[str, Field(min_length=1, max_length=100)]


class ReviewerOfRequest(StrictBody):
    """A rule of a request, and who reviews it. `conversation`, as the queue has it, is needed where
    several checks have the request's id.
    """

    request_id: Name
    rule: Name
    reviewer: Name
    conversation: str | None = None


class FeedbackRequest(ReviewerOfRequest):
    """A label. `messages` are needed where the check was not kept."""

    label: Label
    note: Annotated[str, Field(max_length=2_000)] = ""
    messages: Annotated[
        list[MessageBody] | None, Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    ] = None


class ForgottenConversation(BaseModel):
    """How many checks of a conversation were kept."""

    checks: int


@router.post(FEEDBACK)
async def label(body: FeedbackRequest, request: Request) -> Tally:
    """Count a reviewer's label for a rule of a request."""
    Caller.of(request).catalogue.card(body.rule)
    vote = (_reviewed(request, body), body.label, body.note, _brought(body, request))
    return await answered(request, ReviewStore.vote, *vote)


@router.delete(FEEDBACK)
async def withdraw(named: Annotated[ReviewerOfRequest, Query()], request: Request) -> Tally:
    """Take a reviewer's label back."""
    return await answered(request, ReviewStore.withdraw, _reviewed(request, named))


@router.get("/admin/reviews")
async def queue(
    request: Request,
    reviewer: str,
    rule: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> list[QueuedReview]:
    """What this reviewer has not labelled, the most pressing first."""
    if Caller.of(request).admin is not None:
        reviewer = acting(request, "reviewer")
    return await answered(request, ReviewStore.queue, reviewer, rule, limit)


@router.delete("/admin/reviews/{conversation}")
async def forget(conversation: str, request: Request) -> ForgottenConversation:
    """Delete all that is kept of a conversation."""
    acting(request, "reviewer")
    checks = await answered(request, ReviewStore.forget, conversation)
    return ForgottenConversation(checks=checks)


async def answered(request: Request, ask: Callable[..., Answer], *arguments: object) -> Answer:
    """What a method of the store says. Raises HTTPException where it refuses or nothing is kept."""
    keeper = CheckService.of(request).keeper
    if keeper is None:
        raise HTTPException(404, OFF)
    try:
        return await keeper.answer(ask, *arguments)
    except (NotKept, VoteRefused) as error:
        status = 404 if isinstance(error, NotKept) else 409
        raise HTTPException(status, str(error)) from error
    except GuardError as error:
        log.error("the review store could not answer: %s", error)
        raise HTTPException(503, "the review store failed; the server's log says why") from error


def _reviewer(request: Request, stated: str) -> str:
    """Who votes: of a tenant itself, whatever it states, or it could agree with itself; so does an
    admin. Raises HTTPException 403 for a viewer, 422 where a tenant is stated without tenants.
    """
    caller = Caller.of(request)
    if caller.tenant is not None:
        return f"{TENANT}{caller.tenant.name}"
    if caller.admin is not None:
        return acting(request, "reviewer")
    if stated.startswith(TENANT):
        raise HTTPException(422, f"reviewer: {TENANT} begins the names of tenants")
    return stated


def _reviewed(request: Request, named: ReviewerOfRequest) -> Reviewed:
    """What the caller votes on: a tenant on its own requests alone."""
    tenant, reviewer = Caller.of(request).tenant, _reviewer(request, named.reviewer)
    own = tenant.name if tenant else None
    return Reviewed(named.request_id, named.rule, reviewer, own, named.conversation)


def _brought(body: FeedbackRequest, request: Request) -> KeptCheck | None:
    """The conversation that came with a label. Raises HTTPException for one that nobody reads."""
    if body.messages is None:
        return None
    messages = from_chat(body.messages, ())
    Caller.of(request).check_size([messages])
    if says_nothing(messages):
        raise HTTPException(422, "messages: no message has any text")
    tenant = _reviewed(request, body).tenant or ""
    key = conversation_key(messages, None, request.headers.get(SESSION_HEADER, ""), tenant)
    return KeptCheck(body.request_id, tenant, key, messages)
