"""The PEFT baseline answers as PEFT does and keeps an LRU, or beating it would mean nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from serve.bench.workload.peft_baseline import PeftBaseline
from tests.serve.cards import recipe
from tests.serve.guarded import CONVERSATION, peft_logit, save_adapter

pytestmark = pytest.mark.slow

TEXT = "The assistant must not be rude."


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("baseline")
    return {
        name: save_adapter(root / name, name, seed=seed)
        for seed, name in enumerate(("one", "two", "three"))
    }


def test_every_answer_is_peft_s_whatever_was_in_the_batch(folders: dict[str, Path]) -> None:
    server = PeftBaseline(recipe(), folders, capacity=2)
    turns, names = (1, 2, 3, 2, 3, 1, 3, 1, 2), list(folders) * 3
    wanted = [(CONVERSATION[:turn], name) for turn, name in zip(turns, names, strict=True)]
    requests = [server.submit(messages, TEXT, name) for messages, name in wanted]
    steps = 0
    while not all(request.done for request in requests):
        server.step()
        steps += 1
    assert steps == 5  # two of the three adapters at a time
    expected = [peft_logit(messages, TEXT, folders[name]) for messages, name in wanted]
    assert [request.logit for request in requests] == pytest.approx(expected, abs=2e-3)
    assert len({round(logit, 3) for logit in expected}) == len(expected)
    dense: list[str] = []  # what oneDNN does not compute, nor an adapter
    for name, layer in server._model.named_modules():
        if type(layer) is torch.nn.Linear and "lora_" not in name:
            dense.append(name.rpartition(".")[2])
    assert dense == ["lm_head"]


def test_the_adapter_used_least_recently_is_read_again_and_a_batch_is_never_too_large(
    folders: dict[str, Path],
) -> None:
    server = PeftBaseline(recipe(), folders, capacity=2, batch=2)
    read = []
    for name in ("one", "two", "one", "three", "one", "two"):
        before = server.loads
        request = server.submit(CONVERSATION[:1], TEXT, name)
        server.step()
        expected = peft_logit(CONVERSATION[:1], TEXT, folders[name])
        assert request.logit == pytest.approx(expected, abs=2e-3)
        read.append(server.loads - before)
    assert read == [0, 1, 0, 1, 0, 1]  # the first came with the start
    requests = [server.submit(CONVERSATION[:1], TEXT, "one") for _ in range(3)]
    server.step()
    assert [request.done for request in requests] == [True, True, False]
