"""Review stores with a key of their own. Tests only."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from cryptography.fernet import Fernet

from guard.conversation.example import Message
from guard.layout import Runs
from serve.registry.reviews import (
    KEY,
    KeptCheck,
    KeptVerdict,
    Label,
    Reviewed,
    ReviewPolicy,
    ReviewStore,
)

SECRET = "the sea is a secret"


def new_key() -> str:
    return Fernet.generate_key().decode()


def opened(root: Path, **policy: Any) -> ReviewStore:
    """A store that keeps everything, by the environment's key or a new one."""
    os.environ.setdefault(KEY, new_key())
    everything = {"share": 1.0, "uncertain": 1.0, "flagged": 1.0}
    store = ReviewStore(Runs(root), ReviewPolicy(**{**everything, **policy}))
    store.open()
    return store


def checked(
    name: str, verdict: Label = "allow", *, confident: bool = True, text: str = SECRET
) -> KeptCheck:
    """A check of two rules, the first with this verdict, in a conversation of the same name."""
    p = {"allow": 0.1, "violation": 0.9}
    verdicts = (
        KeptVerdict("mild", "v1", verdict, p[verdict], 0.5, confident),
        KeptVerdict("other", "v1", "allow", 0.1, 0.5, True),
    )
    return KeptCheck(name, "", f"key {name}", (Message("user", text),), verdicts)


def of(name: str, reviewer: str, rule: str = "mild") -> Reviewed:
    return Reviewed(name, rule, reviewer)
