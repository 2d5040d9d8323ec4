"""The shared engine, as the tests of the engine use it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from serve.engine import GuardEngine
from tests.serve.cards import RULE_TEXTS
from tests.serve.guarded import guard_engine


@pytest.fixture
def engine() -> Iterator[GuardEngine]:
    """The shared engine with an empty prefix cache."""
    engine = guard_engine()
    engine.forget()
    yield engine
    assert list(engine.rules) == list(RULE_TEXTS)
