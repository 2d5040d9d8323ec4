"""Adapters are read beside the steps. vLLM with few of many in memory: test_slots.py."""

from __future__ import annotations

import threading
from concurrent.futures import wait
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_alora.weights.prefetch import PREFETCH, Prefetch, connect

from tests.waiting import wait_until

pytestmark = pytest.mark.slow

BROKEN = 13


class ToyManager:
    """Reads adapters when it is let; a `BROKEN` one raises."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.read: list[int] = []
        self.packed: list[str] = []
        self._adapter_manager = SimpleNamespace(
            _registered_adapters={1: "in memory"},
            _create_merged_loras_inplace=self.packed.append,
        )
        self.prefetch = Prefetch(self, max_ahead=2)

    def _load_adapter(self, lora_request: Any) -> str:
        # The reading thread must not wait for itself.
        assert self.prefetch.take(lora_request.lora_int_id) is None
        assert self.go.wait(10)
        self.read.append(lora_request.lora_int_id)
        if lora_request.lora_int_id == BROKEN:
            raise OSError("broken")
        return f"adapter {lora_request.lora_int_id}"

    def is_ready(self, *numbers: int) -> list[bool]:
        asked = [SimpleNamespace(lora_int_id=number) for number in numbers]
        return [self.prefetch.is_ready(request) for request in asked]

    def until_ready(self, *numbers: int) -> None:
        self.go.set()
        wait_until(lambda: all(self.is_ready(*numbers)), 10)


def test_what_is_in_memory_is_ready_and_the_rest_is_read_once_and_in_order() -> None:
    manager = ToyManager()
    assert manager.is_ready(1, 5, 4, 5, 4) == [True, *[False] * 4]
    manager.until_ready(5, 4)
    assert manager.read == [5, 4]
    taken = [manager.prefetch.take(number) for number in (4, 4, 5)]
    assert taken == ["adapter 4", None, "adapter 5"]
    assert manager.packed == ["adapter 5", "adapter 4"]
    manager.prefetch.wait()  # which ends when nothing is read
    manager.until_ready(BROKEN)
    with pytest.raises(OSError, match="broken"):
        manager.prefetch.take(BROKEN)
    manager.until_ready(4)


def test_only_so_many_are_read_ahead_and_one_that_nobody_takes_makes_room() -> None:
    manager = ToyManager()
    assert not any(manager.is_ready(4, 5, 6, 7))
    manager.until_ready(4, 5)
    for _ in range(2):
        assert manager.is_ready(6) == [False]
        # Both were asked for in the step that is being scheduled, or in the one before.
        assert manager.read == [4, 5]
        manager.prefetch.begin_step()
    manager.until_ready(6)
    assert manager.read == [4, 5, 6]
    assert manager.prefetch.take(4) is None
    assert manager.prefetch.take(6) == "adapter 6"


def test_what_is_asked_for_again_is_not_dropped_for_others_although_it_is_read_in_between() -> None:
    manager = ToyManager()
    assert manager.is_ready(4, 5) == [False, False]
    manager.go.set()
    wait([manager.prefetch._read_ahead[number] for number in (4, 5)])
    assert manager.is_ready(6) == [False]
    manager.prefetch.begin_step()
    assert manager.is_ready(4, 5) == [True, True]
    assert manager.read == [4, 5]


def test_an_engine_that_is_to_read_none_ahead_has_no_prefetch() -> None:
    for ahead in (0, 3):
        runner = SimpleNamespace(lora_manager=SimpleNamespace(prefetch=None))
        driver = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
        core: Any = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=driver),
            scheduler=SimpleNamespace(connector=SimpleNamespace(prefetch=None)),
            vllm_config=SimpleNamespace(additional_config={PREFETCH: ahead}),
        )
        connect(core)
        assert (core.scheduler.connector.prefetch is None) == (ahead == 0)
        assert runner.lora_manager.prefetch is core.scheduler.connector.prefetch
