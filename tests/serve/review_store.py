"""Review stores with a key of their own. Tests only."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from cryptography.fernet import Fernet

from guard.conversation.example import Message
from guard.layout import Runs
from serve.registry import reviews

SECRET = "the sea is a secret"


def new_key() -> str:
    return Fernet.generate_key().decode()


def opened(root: Path, **policy: Any) -> reviews.ReviewStore:
    """A store that keeps everything, by the environment's key or a new one."""
    os.environ.setdefault(reviews.KEY, new_key())
    everything = {"share": 1.0, "uncertain": 1.0, "flagged": 1.0}
    store = reviews.ReviewStore(Runs(root), reviews.ReviewPolicy(**{**everything, **policy}))
    store.open()
    return store


def checked(
    name: str, verdict: reviews.Label = "allow", *, confident: bool = True, text: str = SECRET
) -> reviews.KeptCheck:
    """A check of two rules, the first with this verdict, in a conversation of the same name."""
    p = {"allow": 0.1, "violation": 0.9}
    verdicts = (
        reviews.KeptVerdict("mild", "v1", verdict, p[verdict], 0.5, confident),
        reviews.KeptVerdict("other", "v1", "allow", 0.1, 0.5, True),
    )
    return reviews.KeptCheck(name, "", f"key {name}", (Message("user", text),), verdicts)


def of(name: str, reviewer: str, rule: str = "mild") -> reviews.Reviewed:
    return reviews.Reviewed(name, rule, reviewer)
