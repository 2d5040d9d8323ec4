"""Unknown keys are named, and many of them are one error."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from serve.api.errors import NAMED_PROBLEMS
from serve.api.formats.check import CheckRequest
from serve.api.formats.known_keys import KnownKeys
from serve.api.formats.moderations import ModerationRequest

BODIES = {
    CheckRequest: {"messages": [{"role": "user", "content": "Hi"}]},
    ModerationRequest: {"input": "Hi"},
}


def problems(kind: type[KnownKeys], unknown: int) -> list[str]:
    """What is said of a body with so many unknown keys."""
    body = BODIES[kind] | {f"key_{number}": number for number in range(unknown)}
    with pytest.raises(ValidationError) as error:
        kind.model_validate(body)
    return [problem["type"] for problem in error.value.errors()]


@pytest.mark.parametrize("kind", BODIES)
def test_each_of_few_unknown_keys_is_named_and_many_are_one_error(kind: type[KnownKeys]) -> None:
    assert problems(kind, NAMED_PROBLEMS) == ["extra_forbidden"] * NAMED_PROBLEMS
    assert problems(kind, 100_000) == ["value_error"]


def test_of_many_wrong_messages_the_first_is_named() -> None:
    with pytest.raises(ValidationError) as error:
        CheckRequest.model_validate({"messages": [{"role": "user", "content": "Hi", "x": "y"}] * 9})
    assert [problem["loc"] for problem in error.value.errors()] == [("messages", 0)]
