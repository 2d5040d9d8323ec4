"""What OpenAI's API answers instead of a result, in all of its formats."""

from __future__ import annotations

from typing import Any

MALFORMED = 400
CODES = {
    401: "invalid_api_key",
    404: "model_not_found",
    422: "unjudged",
    429: "rate_limit_exceeded",
}


def error_body(status: int, message: str) -> dict[str, Any]:
    """OpenAI's error object, with the code "unjudged" where a conversation has no verdict."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    error = {"message": message, "type": kind, "param": None, "code": CODES.get(status)}
    return {"error": error}
