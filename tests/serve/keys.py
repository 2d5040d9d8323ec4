"""Keys of conversations that a canary decides for, or not. Tests only."""

from __future__ import annotations

from serve.api.rollouts import KEY_DIGITS


def key_at(point: float) -> str:
    """A key at this place among all, from 0 to 1."""
    return f"{int(point * 16**KEY_DIGITS):0{KEY_DIGITS}x}"
