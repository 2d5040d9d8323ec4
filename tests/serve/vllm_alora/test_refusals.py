"""What cannot be served is one request's error; the engine answers the next request."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm_alora.adapter import AdapterError
from vllm_alora.arrival import InvocationError

from tests.serve.adapters import save_random_adapter
from tests.serve.served import Served, reference
from tests.serve.vllm_alora.checked_engine import assert_peft

pytestmark = pytest.mark.slow


def missing(folder: Path) -> None:
    shutil.rmtree(folder)


def changed(folder: Path, change: Callable[[str, torch.Tensor], tuple[str, torch.Tensor]]) -> None:
    weights = folder / "adapter_model.safetensors"
    save_file(dict(change(*item) for item in load_file(weights).items()), weights)


def not_a_number(folder: Path) -> None:
    changed(folder, lambda name, tensor: (name, torch.full_like(tensor, torch.nan)))


def other_names(folder: Path) -> None:
    changed(folder, lambda name, tensor: (name.replace("mlp", "ffn"), tensor))


def rank_above_the_limit(folder: Path) -> None:
    save_random_adapter(folder, seed=1, rank=32, targets=["q_proj"])


def answers(served: Served) -> bool:
    """Whether the engine still answers, and rightly."""
    prompt = list(range(30, 70))
    difference = (served.ask_one(prompt, None).log_probs - reference(prompt, None)).abs().max()
    return bool(difference < 1e-3) and not served.scheduler.has_unfinished_requests()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (missing, "the adapter has no adapter_config.json"),
        (not_a_number, "NaN"),
        (other_names, "no such layer"),
        (rank_above_the_limit, "rank 32 is greater than max_lora_rank 16"),
    ],
)
def test_a_bad_adapter_is_one_requests_error(
    served: Served,
    adapters: dict[str, str],
    tmp_path: Path,
    spoil: Callable[[Path], None],
    message: str,
) -> None:
    folder = Path(shutil.copytree(adapters["lora"], tmp_path / "adapter"))
    spoil(folder)
    with pytest.raises(AdapterError, match=message):
        served.ask([list(range(30, 50)), list(range(30, 70))], [None, str(folder)])
    assert answers(served)


def test_a_prompt_without_the_invocation_is_one_requests_error(
    served: Served, adapters: dict[str, str]
) -> None:
    with pytest.raises(InvocationError, match="does not contain the invocation tokens"):
        served.ask_one(list(range(30, 70)), adapters["first"])
    assert answers(served)


def test_preloading_an_adapter_with_a_tensor_that_has_no_place_is_an_error(
    served: Served, adapters: dict[str, str], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(adapters["lora"], tmp_path / "adapter"))
    changed(folder, lambda name, tensor: (name.replace("layers.5", "layers.6"), tensor))
    problem = r"layers that the engine cannot adapt \(got model\.layers\.6"
    with pytest.raises(AdapterError, match=problem):
        served.llm.llm_engine.add_lora(served.request(str(folder)))
    assert answers(served)


def test_preloading_a_good_adapter_is_enough_to_use_it(
    served: Served, adapters: dict[str, str]
) -> None:
    request = served.request(adapters["lora"])
    served.llm.llm_engine.add_lora(request)
    assert request.lora_int_id in served.llm.llm_engine.list_loras()
    prompt = list(range(30, 70))
    assert_peft(served.ask_requests([prompt], [request]), [prompt], [adapters["lora"]])
