"""Bodies without unknown keys, however many are sent. Knows nothing of any format."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

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
        unknown = [key for key in body if key not in cls.model_fields]
        if len(unknown) > NAMED_PROBLEMS:
            raise ValueError(f"{len(unknown)} keys are unknown; GET /docs lists the known ones")
        return body
