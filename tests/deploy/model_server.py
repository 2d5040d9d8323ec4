"""The model behind a gateway: an OpenAI-compatible server that says what it is told. Tests only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.responses import StreamingResponse

SAYS = "Say: "  # a user's message that begins so is followed by the reply,
LEFT_OUT = "~"  # which holds none of these: what asks for a word need not hold it


def model_app() -> FastAPI:
    """Replies with what the last user's message tells it to, whole or word by word.

    `app.state.asked` are the messages that reached the model.
    """
    app = FastAPI()
    app.state.asked = []

    @app.post("/v1/chat/completions", response_model=None)
    def complete(body: dict[str, Any]) -> dict[str, Any] | StreamingResponse:
        app.state.asked.append(body["messages"])
        content = body["messages"][-1]["content"]
        if isinstance(content, list):
            content = "".join(part["text"] for part in content)
        said = content.partition(SAYS)[2]
        # The first line: what a gateway may have written behind it is no part of it.
        reply = said.partition("\n")[0].replace(LEFT_OUT, "") or "All is well."
        head = {"id": "chatcmpl-1", "created": 1, "model": body["model"]}
        if body.get("stream"):
            return StreamingResponse(_events(head, reply), media_type="text/event-stream")
        message = {"role": "assistant", "content": reply}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return head | {"object": "chat.completion", "choices": [choice], "usage": usage}

    return app


def _events(head: dict[str, Any], reply: str) -> Iterator[str]:
    for word in reply.split(" "):
        delta = {"role": "assistant", "content": f"{word} "}
        yield _event(head, {"index": 0, "delta": delta, "finish_reason": None})
    yield _event(head, {"index": 0, "delta": {}, "finish_reason": "stop"})
    yield "data: [DONE]\n\n"


def _event(head: dict[str, Any], choice: dict[str, Any]) -> str:
    chunk = head | {"object": "chat.completion.chunk", "choices": [choice]}
    return f"data: {json.dumps(chunk)}\n\n"
