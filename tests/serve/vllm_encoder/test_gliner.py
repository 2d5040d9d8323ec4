"""GLiNER2 in vLLM against gliner2 and PEFT: several labels, each text its own adapter."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from gliner2.classification import ClassificationSchema
from gliner2.classification.compiler import compile_schema
from gliner2.classification.scoring import ClassificationScorer
from safetensors.torch import load_file, save_file

from guard.method import PEFT_WEIGHTS
from tests.gliner2_toy import (
    CLASSIFIER_TARGETS,
    ENCODER_TARGETS,
    TARGETS,
    adapted,
    fresh,
    save_adapter,
    save_base,
)
from tests.serve.served import shut_down

pytestmark = pytest.mark.slow

PARITY = 1e-5
# Name -> rank and targets: of all, of a low rank, and of each alone.
ADAPTERS: dict[str, tuple[int, tuple[str, ...]]] = {
    "encoder": (8, ENCODER_TARGETS),
    "all": (4, TARGETS),
    "classifier": (8, CLASSIFIER_TARGETS),
    **{target: (2, (target,)) for target in TARGETS},
}
TEXTS = (
    "My head hurts.",
    "Take 800 mg of ibuprofen every four hours, with water, and rest until the pain is gone. " * 3,
    "Hello",
)
LENGTHS = 3  # different ones among TEXTS


@dataclass
class Toy:
    """A random GLiNER2, its folder and those of its adapters."""

    model: Any
    folder: Path
    adapters: dict[str, Path]


def schema() -> Any:
    labels = {"dosage": "names an amount of a medicine", "diagnosis": "names an illness"}
    two_tasks = ClassificationSchema().multi("advice", labels, threshold=0.4)
    return two_tasks.single("tone", ["friendly", "neutral", "rude"])


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    root = tmp_path_factory.mktemp("gliner")
    adapters: dict[str, Path] = {}
    for seed, (name, (rank, targets)) in enumerate(ADAPTERS.items(), start=1):
        adapters[name] = save_adapter(root / name, seed=seed, rank=rank, targets=targets)
    return Toy(fresh(), save_base(root / "base"), adapters)


@pytest.fixture(scope="module")
def engine(toy: Toy) -> Iterator[Any]:
    import vllm_encoder

    import serve.engine.backends.environment  # noqa: F401 - sets what vLLM reads

    vllm_encoder.register()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    args = EngineArgs(
        model=str(toy.folder),
        hf_config_path=str(toy.folder / "encoder_config"),
        hf_overrides={"architectures": ["GlinerForClassification"]},
        runner="pooling",
        dtype="float32",
        max_model_len=128,
        enable_lora=True,
        max_loras=len(ADAPTERS),
        max_num_batched_tokens=8192,
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
        kv_cache_memory_bytes=2**20,
    )
    engine = LLMEngine.from_engine_args(args)
    yield engine
    shut_down(engine)


def prompt(toy: Toy, text: str) -> tuple[list[int], list[int]]:
    """The token ids of a text behind the schema, and where its labels stand."""
    rows = [(text, compile_schema(schema()).build())]
    batch = toy.model.processor.collate_fn_inference(rows, architecture="span")
    positions: list[int] = []
    for of_task in batch.schema_special_indices[0]:
        positions += of_task[1:]  # the first is the task's own marker
    return batch.input_ids[0].tolist(), positions


def expected(toy: Toy, text: str, name: str | None) -> list[float]:
    model = adapted(toy.adapters[name] if name else None)
    scores = ClassificationScorer(model).score(text, schema())
    logits: list[float] = []
    for task in scores.tasks.values():
        logits += task.values()
    return logits


def logits(engine: Any, toy: Toy, requests: list[tuple[str, str | None]]) -> list[list[float]]:
    """Of each text and adapter, all in one step."""
    from vllm import PoolingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request
    from vllm_encoder.gliner import LABEL_POSITIONS

    for number, (text, name) in enumerate(requests):
        token_ids, positions = prompt(toy, text)
        params = PoolingParams(
            task="token_embed",
            extra_kwargs={LABEL_POSITIONS: positions},
            skip_reading_prefix_cache=True,
        )
        lora = None
        if name:
            adapter_id = 1 + list(toy.adapters).index(name)
            lora = LoRARequest(name, adapter_id, str(toy.adapters[name]))
        request = Request(str(number), token_ids, None, params, lora_request=lora)
        engine.engine_core.engine_core.add_request(request)  # as our backend does
    found = {}
    for output in engine.engine_core.get_output().outputs:
        found[output.request_id] = output.pooling_output.flatten().tolist()
    return [found[str(number)] for number in range(len(requests))]


def mates(*names: str | None) -> list[tuple[str, str | None]]:
    """Every text with each of these adapters, None for none."""
    return [(text, name) for text in TEXTS for name in names]


def test_a_mixed_batch_says_what_gliner2_says_with_each_alone(engine: Any, toy: Toy) -> None:
    assert len({len(prompt(toy, text)[0]) for text in TEXTS}) == LENGTHS
    asked = mates(None, *ADAPTERS)
    found = logits(engine, toy, asked)
    for (text, name), of_labels in zip(asked, found, strict=True):
        assert len(of_labels) == 5
        assert of_labels == pytest.approx(expected(toy, text, name), abs=PARITY), name
    # Every target has an effect, so that parity holds of something.
    of_one_text = found[len(ADAPTERS) + 1 : 2 * (len(ADAPTERS) + 1)]
    assert len({round(of_labels[0], 3) for of_labels in of_one_text}) == len(of_one_text)


def test_states_not_finite_spoil_no_batch_mate(engine: Any, toy: Toy, tmp_path: Path) -> None:
    """Although they are the step's first, which all shorter rows read behind their end."""
    folder = save_adapter(tmp_path / "broken", seed=1, rank=8, targets=ENCODER_TARGETS)
    tensors = load_file(folder / PEFT_WEIGHTS)
    huge = {key: tensor * 1e30 for key, tensor in tensors.items()}  # finite, as no product of them
    save_file(huge, folder / PEFT_WEIGHTS)
    with_broken = Toy(toy.model, toy.folder, toy.adapters | {"broken": folder})
    others = mates(None, "all")
    broken, *together = logits(engine, with_broken, [(TEXTS[1], "broken"), *others])
    assert all(math.isnan(logit) for logit in broken)
    for (text, name), of_mate in zip(others, together, strict=True):
        assert of_mate == pytest.approx(expected(toy, text, name), abs=PARITY)


def test_a_tensor_that_has_no_place_is_refused(engine: Any, toy: Toy, tmp_path: Path) -> None:
    """vLLM would drop it silently; `count_pred` is a head that is not served."""
    from vllm.lora.request import LoRARequest

    folder = save_adapter(tmp_path / "odd", seed=1, rank=4, targets=("query_proj", "count_pred.0"))
    with pytest.raises(Exception, match=r"count_pred\.0"):
        engine.add_lora(LoRARequest("odd", 99, str(folder)))
    tensors = load_file(folder / PEFT_WEIGHTS)
    placed = {key: tensor for key, tensor in tensors.items() if "count_pred" not in key}
    misnamed = {key.replace(".self.", ".self_attn."): tensor for key, tensor in placed.items()}
    save_file(misnamed, folder / PEFT_WEIGHTS)
    with pytest.raises(Exception, match=r"self_attn"):
        engine.add_lora(LoRARequest("odd", 100, str(folder)))
