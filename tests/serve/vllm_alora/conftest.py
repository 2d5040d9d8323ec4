from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.serve.served import Served

if TYPE_CHECKING:
    from tests.serve.vllm_alora.checked_engine import CheckedEngine


@pytest.fixture
def checked(served: Served, adapters: dict[str, str]) -> CheckedEngine:
    """The session's engine."""
    from tests.serve.vllm_alora.checked_engine import CheckedEngine  # vLLM, which starts slowly

    return CheckedEngine(served, adapters)
