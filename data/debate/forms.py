"""The answers of a debate in the form that they have to have.

Knows nothing of what is asked or of who answers.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from data.llm_reply import Form


class Dimension(Form):
    """A way in which cases of the policy differ, and its possible values."""

    name: str = Field(min_length=1)
    values: tuple[str, ...] = Field(min_length=2)


class Decomposition(Form):
    """The answer to the decomposition of the policy."""

    dimensions: tuple[Dimension, ...] = Field(min_length=2)


class DraftTurn(Form):
    """One message of a draft."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = Field(min_length=1)


class ConversationDraft(Form):
    """A case as its writer gives it."""

    messages: tuple[DraftTurn, ...] = Field(min_length=1)
    reasoning: str


class Vote(Form):
    """The decision of one judge."""

    violates: bool
    reason: str
