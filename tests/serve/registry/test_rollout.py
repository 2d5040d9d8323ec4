from __future__ import annotations

import pytest

from guard.errors import GuardError
from serve.registry.rollout import ENFORCE, OFF, Mode


@pytest.mark.parametrize(
    ("text", "share"),
    [("enforce", 1.0), ("shadow", 0.0), ("canary:10%", 0.1), ("canary:0.5%", 0.005), ("off", None)],
)
def test_a_mode_is_read_as_it_is_written(text: str, share: float | None) -> None:
    assert Mode.parse(text).share == pytest.approx(share)
    assert str(Mode.parse(text)) == text
    assert Mode.parse("enforce") == ENFORCE and Mode.parse("off") == OFF


@pytest.mark.parametrize("text", ["", "canary", "canary:0%", "canary:100%", "canary:-1%", "on"])
def test_another_word_is_no_mode(text: str) -> None:
    with pytest.raises(GuardError, match="no mode"):
        Mode.parse(text)
