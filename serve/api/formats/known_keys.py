"""Bodies without unknown keys, however many are sent, or without words under one. Knows nothing of
any format.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from guard.conversation import keys
from serve.api.errors import NAMED_PROBLEMS


class KnownKeys(BaseModel):
    """A body whose unknown keys are refused: each by name, or as one error where there are more
    than an answer names. Of a body full of them pydantic would make an error each, for seconds.
    """

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _has_few_unknown_keys(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        unknown = body.keys() - cls.model_fields.keys()
        if len(unknown) > NAMED_PROBLEMS:
            raise ValueError(f"{len(unknown)} keys are unknown; GET /docs lists the known ones")
        return body


class NoHiddenWords(BaseModel):
    """A body as a gateway sends it. An unknown key that may hold words, which no rule would read,
    is refused, unless it is one of `silent_keys`, which carry no text that is judged.
    """

    silent_keys: ClassVar[keys.Shapes] = {}

    @model_validator(mode="before")
    @classmethod
    def _hides_no_words(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        for key in keys.unread_keys(body, cls.silent_keys, cls.model_fields):
            raise ValueError(f"the key {key!r} is unknown, and no rule would read what it says")
        return body
