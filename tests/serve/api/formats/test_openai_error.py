"""OpenAI's error object."""

from __future__ import annotations

import pytest

from serve.api.formats.openai_error import error_body
from serve.engine.codes import Code


@pytest.mark.parametrize(
    ("status", "kind", "code", "openai_code"),
    [
        (400, "invalid_request_error", "request_refused", "request_refused"),
        (404, "invalid_request_error", "request_refused", "model_not_found"),
        (422, "invalid_request_error", "too_long", "too_long"),
        (503, "server_error", "overloaded", "overloaded"),
    ],
)
def test_an_error_says_whose_fault_it_is_and_has_no_verdict(
    status: int, kind: str, code: Code, openai_code: str
) -> None:
    error = {"message": "too long", "type": kind, "param": None, "code": openai_code}
    assert error_body(status, "too long", code) == {"error": error}
