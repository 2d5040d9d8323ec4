"""Which keys of a conversation's objects carry no text that is judged. What stands under any other
key is read, or keeps the conversation from being allowed. Knows nothing of how it is read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

# A model's reasoning is its own, and is not judged.
REASONING = {"reasoning", "reasoning_content", "reasoning_details", "thinking", "thinking_blocks"}
# What providers keep, such as a signature of their model's thoughts.
PROVIDER = {"extra_content", "provider_specific_fields"}
CACHE = {"cache_control", "prompt_cache_breakpoint"}
# Of a message as clients, gateways and logs have it: what tells when, where and by which model it
# was written. Annotations are of sources.
MESSAGE = frozenset(
    {"id", "index", "type", "object", "status", "phase", "model", "annotations", "usage"}
    | {"created", "created_at", "timestamp", "finish_reason", "stop_reason", "stop_sequence"}
    | REASONING
    | PROVIDER
    | CACHE
)
PART = frozenset({"id", "index", "annotations"} | CACHE)  # of a part that is text
TOOL = frozenset({"id", "index", "type"})  # of a tool or a tool call, beside its function
CALL = frozenset(PROVIDER)  # and of a call
CHOICE = frozenset(
    {"index", "finish_reason", "stop_reason", "logprobs", "token_ids", "content_filter_results"}
    | PROVIDER
)
COMPLETION = frozenset(
    {"id", "object", "created", "model", "provider", "system_fingerprint", "service_tier", "usage"}
    | {"metadata", "moderation", "prompt_filter_results", "metrics"}
)
# A key is named only if it looks like one: it appears in reasons and logs.
NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")


def unknown_keys(fields: Mapping[str, Any], known: Collection[str]) -> Iterator[tuple[str, bool]]:
    """The keys that are not known, each as it may be named, and whether it or what stands under it
    may hold words.
    """
    for key, value in fields.items():
        if key in known:
            continue
        if NAME.fullmatch(str(key)):
            yield key, _may_say(value)
        else:
            yield "(no name)", True


def first_that_may_say(fields: Mapping[str, Any], known: Collection[str]) -> str | None:
    """The first unknown key with which words may come; None if there is none."""
    for name, may_say in unknown_keys(fields, known):
        if may_say:
            return name
    return None


def _may_say(value: Any) -> bool:
    """Whether a value may hold words: a text that is not blank, an object, or a list with one of
    them. Numbers, yes and no, and nothing hold none.
    """
    if isinstance(value, str | bytes):
        return bool(value.strip())
    if isinstance(value, list | tuple):
        return any(isinstance(element, str | bytes | list | tuple | dict) for element in value)
    return isinstance(value, dict) and bool(value)
