"""What the tests of serving share: prompts, random adapters, and one real vLLM engine in this
process for the whole session.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR"
)
os.environ.setdefault("OMP_NUM_THREADS", "2")

from guard.prompt.decoder import PromptBuilder
from tests.serve.adapters import BASE, save_random_adapter
from tests.serve.cards import save_trained
from tests.serve.served import Served


@pytest.fixture(scope="session")
def prompts() -> PromptBuilder:
    return PromptBuilder.from_base(BASE)


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory, prompts: PromptBuilder) -> dict[str, str]:
    """Folders of random adapters: `lora`, and three aLoRAs: `first`, `second` (other rank) and
    `marked` (other invocation).
    """
    folder: Path = tmp_path_factory.mktemp("adapters")
    rule_turn = prompts.invocation("a rule")
    return {
        "lora": save_random_adapter(folder / "lora", seed=1, rank=16),
        "first": save_random_adapter(folder / "first", seed=2, rank=16, invocation=rule_turn),
        "second": save_random_adapter(folder / "second", seed=3, rank=8, invocation=rule_turn),
        "marked": save_random_adapter(folder / "marked", seed=4, rank=16, invocation=[7, 11, 13]),
    }


@pytest.fixture(scope="session")
def session_engine() -> Iterator[Served]:
    """One engine for all tests, which use `served`: float32, blocks of 32 tokens."""
    from serve.engine.backends import vllm_engine

    served = Served.start()
    # Else the last engine of the product that is closed takes the process's groups from this one.
    vllm_engine._open.add(id(served))
    yield served
    vllm_engine._open.discard(id(served))
    served.close()


@pytest.fixture
def served(session_engine: Served) -> Served:
    """The session's engine with an empty prefix cache and no limit on its steps but its own."""
    session_engine.reset()
    return session_engine


@pytest.fixture
def checked(served: Served, adapters: dict[str, str]) -> Any:
    """The session's engine, whose answers must be PEFT's."""
    from tests.serve.vllm_alora.checked_engine import CheckedEngine  # vLLM, which starts slowly

    return CheckedEngine(served, adapters)


@pytest.fixture
def threads() -> Iterator[list[int]]:
    """Numbers of threads to compute with; afterwards there are as many as before."""
    import torch

    before = torch.get_num_threads()
    yield [1, 2, 3]
    torch.set_num_threads(before)


@pytest.fixture
def trained_on_both(tmp_path: Path) -> Path:
    """`shared` is trained on both bases, each of the others on one."""
    for path in ("tiny/shared/alora", "tiny/own/alora", "minilm/shared/lora", "minilm/read/lora"):
        save_trained(tmp_path / path)
    return tmp_path
