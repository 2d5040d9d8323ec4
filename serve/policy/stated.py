"""Policies that a request states beside rules: the names by which verdicts, decisions and answers
tell them apart. Knows nothing of what they say.
"""

from __future__ import annotations

from collections.abc import Iterable

STATED = "policies."  # begins such a name; no rule's name has a dot


def named_policies(texts: Iterable[str]) -> dict[str, str]:
    """The texts by their names, which count them from 0."""
    return {f"{STATED}{index}": text for index, text in enumerate(texts)}


def is_stated(name: str) -> bool:
    """Whether it is such a policy's name, and no rule's."""
    return name.startswith(STATED)
