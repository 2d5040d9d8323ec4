"""The PEFT baseline answers as PEFT does and keeps an LRU, or beating it would mean nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from serve.bench.workload import peft_baseline
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
    wanted = [
        (CONVERSATION[:turns], name)
        for name, turns in zip(
            (*folders, *folders, *folders), (1, 2, 3, 2, 3, 1, 3, 1, 2), strict=True
        )
    ]
    requests = [server.submit(messages, TEXT, name) for messages, name in wanted]
    steps = 0
    while not all(request.done for request in requests):
        server.step()
        steps += 1
    assert steps == 5  # two of the three adapters at a time
    expected = [peft_logit(messages, TEXT, folders[name]) for messages, name in wanted]
    assert [request.logit for request in requests] == pytest.approx(expected, abs=2e-3)
    assert len({round(logit, 3) for logit in expected}) == len(expected)


def test_all_of_the_base_is_computed_by_onednn(folders: dict[str, Path]) -> None:
    """Also the layers that an adapter leaves alone."""
    server = PeftBaseline(recipe(), folders)
    dense = [
        name
        for name, layer in server._model.named_modules()
        if type(layer) is torch.nn.Linear and "lora_" not in name
    ]
    assert [name.rpartition(".")[2] for name in dense] == ["lm_head"]


def test_the_adapter_used_least_recently_is_read_again(folders: dict[str, Path]) -> None:
    server = PeftBaseline(recipe(), folders, capacity=2)
    read = []
    for name in ("one", "two", "one", "three", "one", "two"):
        before = server.loads
        request = server.submit(CONVERSATION[:1], TEXT, name)
        server.step()
        assert request.logit == pytest.approx(
            peft_logit(CONVERSATION[:1], TEXT, folders[name]), abs=2e-3
        )
        read.append(server.loads - before)
    assert read == [0, 1, 0, 1, 0, 1]  # the first came with the start


def test_a_batch_is_never_larger_than_it_may_be(folders: dict[str, Path]) -> None:
    server = PeftBaseline(recipe(), folders, batch=2)
    requests = [server.submit(CONVERSATION[:1], TEXT, "one") for _ in range(3)]
    server.step()
    assert [request.done for request in requests] == [True, True, False]


def test_base_adapters_and_prompts_go_where_the_device_is(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that has only shapes stands for a GPU."""
    monkeypatch.setattr(peft_baseline, "_device", lambda: "meta")
    swapped_to: list[str] = []
    monkeypatch.setattr(
        peft_baseline,
        "hotswap_adapter",
        lambda *_, torch_device: swapped_to.append(torch_device),
    )
    server = PeftBaseline(recipe(), folders, capacity=1)
    assert {weight.device.type for weight in server._model.parameters()} == {"meta"}
    given: dict[str, torch.Tensor] = {}

    def stop(_: object, **inputs: torch.Tensor) -> None:
        given.update(inputs)
        raise InterruptedError

    monkeypatch.setattr(type(server._model), "forward", stop)
    server.submit(CONVERSATION, TEXT, "two")
    with pytest.raises(InterruptedError):
        server.step()
    assert swapped_to == ["meta"]
    assert {given[name].device.type for name in ("input_ids", "attention_mask")} == {"meta"}


def test_where_torch_has_a_gpu_that_is_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for available, device in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert peft_baseline._device() == device
