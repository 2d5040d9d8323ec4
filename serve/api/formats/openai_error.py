"""What OpenAI's API answers instead of a result, in all of its formats."""

from __future__ import annotations

from typing import Any

from serve.engine.codes import Code

MALFORMED = 400
# OpenAI's own codes; where it has none, `code` says why there is no verdict.
OPENAI_CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}


def error_body(status: int, message: str, code: Code) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    error = {
        "message": message,
        "type": kind,
        "param": None,
        "code": OPENAI_CODES.get(status, code),
    }
    return {"error": error}
