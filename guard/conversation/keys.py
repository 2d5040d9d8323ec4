"""Which keys of a conversation's objects carry no text that is judged, and which values they have.
Another key or value is read, or keeps the conversation from being allowed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

# What a text under a key may be; in an object or a list each text that is in it.
ANYTHING = re.compile(r".*", re.DOTALL)
NOTHING = re.compile("")  # numbers, true and false alone
ID = re.compile(r"[\w.:/+=,@#|~-]*", re.ASCII)  # one in base64 too, so of any length
WORD = re.compile(r"[\w.:/+@#|<>*`-]{0,100}", re.ASCII)  # a name, or one of a few words
TIME = re.compile(r"[\dTZ:. +-]{0,40}", re.ASCII)
SETTING = re.compile(
    r"ephemeral|persistent|explicit|\d+[smhd]"  # of a cache
    r"|auto|default|standard|priority|flex|scale|batch|global|not_available"  # of a service
)
# The most elements of a list in which no text stands: more could be the codes of a text's letters.
MAX_NUMBERS = 10
MAX_DEPTH = 6  # of what stands under a key; what is nested deeper is not looked at
# A key is named only if it looks like one: it appears in reasons and logs.
NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")

Shapes = Mapping[str, re.Pattern[str]]
# A model's reasoning is its own, and is not judged.
REASONING: Shapes = dict.fromkeys(
    ("reasoning", "reasoning_content", "reasoning_details", "thinking", "thinking_blocks"), ANYTHING
)
REASONING_PARTS = ("thinking", "redacted_thinking", "reasoning")  # the types of such a part
# What providers keep of a tool call, and of whatever else they answer: a signature of their model's
# thoughts, what their filters say, the probabilities and the sources of what is said.
CALL: Shapes = dict.fromkeys(("extra_content", "provider_specific_fields"), ANYTHING)
PROVIDER: Shapes = {
    **CALL,
    **dict.fromkeys(("encrypted_content", "signature", "thought_signature"), ID),
    **dict.fromkeys(("content_filter_results", "prompt_filter_results", "moderation"), ANYTHING),
    **dict.fromkeys(("logprobs", "token_ids", "annotations"), ANYTHING),
}
CACHE: Shapes = dict.fromkeys(("cache_control", "prompt_cache_breakpoint"), SETTING)
# Of a tool or a call, beside its function.
TOOL: Shapes = {"id": ID, "index": NOTHING, "type": WORD}
PART: Shapes = {**TOOL, **REASONING, **PROVIDER, **CACHE}  # of a part that is text
# Of a message as clients, gateways and logs have it: what tells when, where and by which model it
# was written.
MESSAGE: Shapes = {
    **PART,
    **dict.fromkeys(("object", "status", "phase", "model", "modelName", "tool_name"), WORD),
    **dict.fromkeys(("finish_reason", "native_finish_reason", "stop_reason"), WORD),
    **dict.fromkeys(("stop_sequence", "metadata"), WORD),
    **dict.fromkeys(("tool_call_id", "call_id", "user"), ID),
    **dict.fromkeys(("parent_id", "parentId", "childrenIds"), ID),
    **dict.fromkeys(("created", "created_at", "timestamp"), TIME),
    "usage": SETTING,
}
COMPLETION: Shapes = {
    **MESSAGE,
    **dict.fromkeys(("provider", "system_fingerprint", "service_tier", "metrics"), WORD),
}
TEMPLATE: Shapes = {"id": ID, "name": WORD, "version": WORD}  # of a prompt, where a log names it


def unread_keys(
    fields: Mapping[str, Any], silent: Shapes, read: Collection[str] = ()
) -> Iterator[str]:
    """The keys under which words may stand that nobody reads, each as it may be named."""
    for key, value in fields.items():
        if key in read or is_silent(key, value, silent):
            continue
        if not NAME.fullmatch(str(key)):
            yield "(no name)"
        elif not _holds_only(NOTHING, value):
            yield key


def is_silent(key: str, value: Any, silent: Shapes) -> bool:
    shape = silent.get(key)
    return shape is not None and (shape is ANYTHING or _holds_only(shape, value))


def spoken(fields: Mapping[str, Any], silent: Shapes) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if not is_silent(key, value, silent)}


def _holds_only(shape: re.Pattern[str], value: Any, depth: int = MAX_DEPTH) -> bool:
    """Whether every text in a value is blank or has the shape, and every key in it is a name."""
    if isinstance(value, str | bytes):
        text = value.strip()
        return not text or (isinstance(text, str) and shape.fullmatch(text) is not None)
    if not value or not isinstance(value, dict | list | tuple):
        return True
    if isinstance(value, dict):
        is_short = all(NAME.fullmatch(str(key)) for key in value)
        elements = list(value.values())
    else:
        is_short = len(value) <= MAX_NUMBERS or any(isinstance(element, str) for element in value)
        elements = list(value)
    if not is_short or not depth:
        return False
    return all(_holds_only(shape, element, depth - 1) for element in elements)
