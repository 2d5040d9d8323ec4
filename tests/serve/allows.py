"""Whether an answer of the server reads as an allow to the clients of its format. Tests only."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

DETECTIONS = ("/text/contents", "/text/chat", "/text/generation", "/text/context/doc")


def allows(path: str, status: int, text: str) -> bool:
    """Whether an answer reads as "allow" to a client of this path, anywhere in it."""
    if status != 200:
        return False
    if text.startswith("data: "):
        return "no" in _streamed(text)
    if path.endswith(DETECTIONS):
        detections = json.loads(text)
        return not detections or [] in detections
    return path in READERS and READERS[path](json.loads(text))


def _streamed(text: str) -> Iterator[str | None]:
    for line in text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                yield choice["delta"].get("content")


def _verdict(body: dict[str, Any]) -> bool:
    parts = [body, *body.get("results", []), *body.get("turns", [])]
    return any(part["verdict"] == "allow" for part in parts)


def _completion(body: dict[str, Any]) -> bool:
    return any(choice["message"]["content"] != "yes" for choice in body["choices"])


def _moderation(body: dict[str, Any]) -> bool:
    results = body["results"]
    return not results or not all(result["flagged"] for result in results)


def _gateway(body: dict[str, Any]) -> bool:
    return "status_code" not in body["action"]  # it parses as a pass


READERS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "/v1/check": _verdict,
    "/v1/check/turns": _verdict,
    "/v1/chat/completions": _completion,
    "/v1/moderations": _moderation,
    "/beta/litellm_basic_guardrail_api": lambda body: body.get("action") != "BLOCKED",
    "/request": _gateway,
    "/response": _gateway,
}
