"""All wire formats by their names. Knows nothing of what they say."""

from __future__ import annotations

from collections.abc import Mapping

from serve.api.formats import (
    check,
    detectors,
    litellm,
    moderations,
    openai_chat,
    stream,
    turns,
)
from serve.api.wire_format import WireFormat

WIRE_FORMATS: Mapping[str, WireFormat] = {
    "check": check.FORMAT,
    "turns": turns.FORMAT,
    "stream": stream.FORMAT,
    "openai_chat": openai_chat.FORMAT,
    "moderations": moderations.FORMAT,
    "detectors": detectors.FORMAT,
    "litellm": litellm.FORMAT,
}
