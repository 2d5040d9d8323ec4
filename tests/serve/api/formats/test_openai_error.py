"""OpenAI's error object."""

from __future__ import annotations

import pytest

from serve.api.formats.openai_error import error_body


@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [
        (400, "invalid_request_error", None),
        (404, "invalid_request_error", "model_not_found"),
        (422, "invalid_request_error", "unjudged"),
        (503, "server_error", None),
    ],
)
def test_an_error_says_whose_fault_it_is_and_has_no_verdict(
    status: int, kind: str, code: str | None
) -> None:
    error = {"message": "too long", "type": kind, "param": None, "code": code}
    assert error_body(status, "too long") == {"error": error}
