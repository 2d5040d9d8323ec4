"""All wire formats by their names. Knows nothing of what they say."""

from __future__ import annotations

from collections.abc import Mapping

from serve.api.formats import check, classify, litellm, moderations, openai_chat, stream
from serve.api.wire_format import WireFormat

WIRE_FORMATS: Mapping[str, WireFormat] = {
    "check": check.FORMAT,
    "stream": stream.FORMAT,
    "openai_chat": openai_chat.FORMAT,
    "moderations": moderations.FORMAT,
    "litellm": litellm.FORMAT,
    "classify": classify.FORMAT,
}
