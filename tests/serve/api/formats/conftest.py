"""What the tests of wire formats share on the real engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve.engine import GuardEngine
from tests.serve.guarded import guard_engine


@pytest.fixture
def mixed_engine(monkeypatch: pytest.MonkeyPatch) -> GuardEngine:
    """The engine, where "plain" allows nearly everything; to the others nearly all is a violation.

    Random adapters say about a half to everything, and their cards have a threshold of 0.25.
    """
    engine = guard_engine()
    served = engine._rules._served
    card = served["plain"].card.model_copy(update={"threshold": 0.99})
    monkeypatch.setitem(served, "plain", replace(served["plain"], card=card))
    return engine
