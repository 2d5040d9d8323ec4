"""A command sees one GPU, and is none of several that train the same rules."""

from __future__ import annotations

import pytest
from pytest import MonkeyPatch

from guard.errors import GuardError
from train.process import see_one_gpu


@pytest.mark.parametrize(
    ("gpus", "named", "seen"), [(0, None, None), (4, None, "0"), (4, "3,5", "3"), (4, "", "")]
)
def test_of_several_gpus_the_first_is_seen(
    monkeypatch: MonkeyPatch, gpus: int, named: str | None, seen: str | None
) -> None:
    monkeypatch.setattr("train.process.gpus", lambda: ["H200"] * gpus)
    environment = {"HOME": "/"} if named is None else {"CUDA_VISIBLE_DEVICES": named}
    see_one_gpu(environment)
    assert environment.get("CUDA_VISIBLE_DEVICES") == seen


def test_processes_of_a_launcher_which_would_all_train_the_same_are_refused() -> None:
    see_one_gpu({"WORLD_SIZE": "1"})
    with pytest.raises(GuardError, match=r"got WORLD_SIZE=2.*one command a GPU"):
        see_one_gpu({"WORLD_SIZE": "2", "RANK": "1"})
