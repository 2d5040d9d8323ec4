"""What pydantic finds wrong, in words: where, what, and what is there instead."""

from __future__ import annotations

import re
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from guard.wrong_values import wrong_values


class Part(BaseModel):
    kind: str
    text: str | None = None


class Toy(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["user", "tool"] = "user"
    content: str | list[str] | list[Part] = ""
    part: Part | None = None
    tags: dict[str, str] = {}
    count: int = Field(default=1, ge=1)
    lines: list[int] = Field(default=[1], min_length=1)

    @field_validator("tags")
    @classmethod
    def _few(cls, tags: dict[str, str]) -> dict[str, str]:
        if len(tags) > 1:
            raise ValueError("one tag at most")
        return tags


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"content": 5}, "content: Input should be a valid string or a valid list, got 5"),
        ({"content": None}, "content: Input should be a valid string or a valid list, got null"),
        ({"content": {}}, "content: Input should be a valid string or a valid list, got an object"),
        ({"content": [1]}, "content.0: Input should be a valid string or an object, got 1"),
        ({"content": ["a", 1]}, "content.1: Input should be a valid string, got 1"),
        ({"content": [{"text": "x"}]}, "content.0.kind: Field required"),
        ({"content": [{"kind": "a", "text": ["x"]}]}, "content.0.text: .* string, got a list"),
        ({"role": "bot"}, "role: Input should be 'user' or 'tool', got 'bot'"),
        ({"part": True}, "part: Input should be an object, got true"),
        ({"lines": []}, "lines: List should have at least 1 item, not 0"),
        ({"count": 0}, "count: Input should be greater than or equal to 1, got 0"),
        ({"tags": {"a": "b", "c": "d"}}, "tags: one tag at most"),
        ({"tags": {"a": 1}}, "tags.a: Input should be a valid string, got 1"),
        ({"other": 1}, "other: Extra inputs are not permitted"),
        ([], "Input should be an object, got a list"),
        ({"count": "x" * 99, "part": {}}, f"part.kind: F.*\ncount: .*, got '{'x' * 60}'"),
    ],
)
def test_a_wrong_value_is_said_once_with_its_place(content: Any, words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Toy.model_validate(content)
    said = "\n".join(map(str, wrong_values(caught.value.errors(), content)))
    assert re.fullmatch(words, said)
