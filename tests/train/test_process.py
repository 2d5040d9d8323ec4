"""Which of several processes this is: its GPU, and nothing of what the launcher left."""

from __future__ import annotations

import pytest

from guard.errors import GuardError
from train.process import process_of


def test_a_launched_process_is_a_world_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.process.gpus", lambda: ["H200", "H200"])
    launched = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_PORT": "29500",
        "ACCELERATE_USE_CPU": "true",
        "HOME": "/",
    }
    assert process_of(launched) == (1, 2, 2)
    assert launched == {"CUDA_VISIBLE_DEVICES": "1", "HOME": "/"}


def test_a_rank_alone_leaves_no_rule_out_and_one_that_no_process_has_is_refused() -> None:
    assert process_of({"RANK": "3", "LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": ""}) == (0, 1, 1)
    ranks = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    assert process_of({**ranks, "CUDA_VISIBLE_DEVICES": ""}) == (1, 2, 1)
    for name, value in (("RANK", "2"), ("RANK", "-1"), ("LOCAL_RANK", "1")):
        with pytest.raises(GuardError, match=rf"got {name}={value}, .*torchrun"):
            process_of(ranks | {name: value, "CUDA_VISIBLE_DEVICES": ""})


def test_each_process_sees_one_gpu_and_one_without_a_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def seen(gpus: int, **environment: str) -> str | None:
        monkeypatch.setattr("train.process.gpus", lambda: ["H200"] * gpus)
        process_of(environment)
        return environment.get("CUDA_VISIBLE_DEVICES")

    second = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    assert (
        seen(0),
        seen(4),
        seen(4, CUDA_VISIBLE_DEVICES="3,5"),
        seen(4, CUDA_VISIBLE_DEVICES=""),
    ) == (None, "0", "3", "")
    assert (
        seen(0, **second),
        seen(4, **second),
        seen(4, CUDA_VISIBLE_DEVICES="3,5", **second),
    ) == (None, "1", "5")
    assert seen(4, CUDA_VISIBLE_DEVICES="", **second) == ""
    assert seen(1, **second | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}) == "0"  # two machines
    for named in ({}, {"CUDA_VISIBLE_DEVICES": "3"}):
        with pytest.raises(GuardError, match=r"got 2 processes, 1 GPUs"):
            seen(1, **second | named)
    alone = {"HOME": "/", "MASTER_ADDR": "x"}
    monkeypatch.setattr("train.process.gpus", list)
    assert process_of(alone) == (0, 1, 1)
    assert alone == {"HOME": "/", "MASTER_ADDR": "x"}
