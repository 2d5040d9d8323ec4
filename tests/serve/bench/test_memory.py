"""Bases that lie beside each other have equal parts of a GPU, and engines on a CPU the recipe's."""

from __future__ import annotations

import pytest

from serve.bench import memory
from serve.bench.memory import memory_beside


@pytest.mark.parametrize("bases", [1, 2, 5])
def test_the_parts_of_all_bases_are_what_vllm_takes_of_a_gpu_by_itself(
    bases: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "installed_device", lambda: "cuda")
    (share,) = memory_beside(bases).values()
    assert memory_beside(bases) == {"gpu_memory_utilization": share}
    assert bases * share == pytest.approx(0.92)
    monkeypatch.setattr(memory, "installed_device", lambda: "cpu")
    assert memory_beside(bases) == {}
