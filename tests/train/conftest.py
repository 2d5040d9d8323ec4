"""A toy base of two layers behind the real tokenizer, and a rule that one word decides."""

from __future__ import annotations

import functools
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from pytest import MonkeyPatch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from guard.conversation.example import Example, Message, write_examples
from guard.layout import Runs
from guard.method import PEFT_CONFIG, PEFT_WEIGHTS, WORDS
from guard.prompt.decoder import Prompt, PromptBuilder
from guard.recipe import MODELS, Recipe
from guard.rule import Rule
from train import onednn
from train.examples import Row, Rows, load
from train.job import Job
from train.run import finish

TINY = MODELS / "tiny"
RULE = Rule(
    id="toy",
    title="Nobody may mention a refund.",
    policy="Nor imply one.",
    judged="conversation",
    violates=("refund",),
    allows=("banana",),
)
WORDS_OF_ANY_ROW = "please help with my order today we talk about music food and books thanks a lot"
FILLER = WORDS_OF_ANY_ROW.split()
MakeJob = Callable[..., Job]
ADAPTERS = ("lora", "alora")  # those of the toy recipe


SHAPE: dict[str, Any] = {
    "vocab_size": 16384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
    "pad_token_id": 16358,
    "bos_token_id": 16358,
    "eos_token_id": 16360,
}
BASES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
    "qwen3, untied": lambda: Qwen3ForCausalLM(
        Qwen3Config(**SHAPE | {"tie_word_embeddings": False})
    ),
    "llama, one KV head": lambda: LlamaForCausalLM(
        LlamaConfig(**SHAPE | {"num_key_value_heads": 1})
    ),
    "llama, no shared KV heads": lambda: LlamaForCausalLM(
        LlamaConfig(**SHAPE | {"num_key_value_heads": 4, "tie_word_embeddings": False})
    ),
}


@pytest.fixture(scope="session")
def toy_bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a base of BASES, with random weights and the tiny base's tokenizer."""

    @functools.cache
    def folder_of(name: str) -> Path:
        folder = tmp_path_factory.mktemp("toy_base")
        torch.manual_seed(0)
        BASES[name]().save_pretrained(folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TINY / file, folder / file)
        return folder

    return folder_of


@pytest.fixture(scope="session")
def toy_base(toy_bases: Callable[[str], Path]) -> Path:
    return toy_bases("qwen3")


def recipe(base: Path | str, **trainer: object) -> Recipe:
    shared = {
        "num_train_epochs": 3,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "gradient_checkpointing": False,
        "save_steps": 5,
    }
    return Recipe.model_validate(
        {
            "name": "toy",
            "base": str(base),
            "dtype": "float32",
            "context_tokens": 512,
            "trainer": shared | trainer,
            "methods": {
                "lora": {"lora": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}},
                "alora": {"lora": {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}},
            },
            "engine": {"max_lora_rank": 16},
        }
    )


def conversation(rng: random.Random, label: int) -> tuple[Message, ...]:
    turns = [
        [rng.choice(FILLER) for _ in range(rng.randint(2, 6))] for _ in range(rng.randint(1, 3))
    ]
    turn = rng.choice(turns)
    turn[rng.randrange(len(turn))] = "refund" if label else "banana"
    return tuple(
        Message("user" if index % 2 == 0 else "assistant", " ".join(words))
        for index, words in enumerate(turns)
    )


def write_toy_data(folder: Path, n_train: int = 64, n_other: int = 32, rule: str = RULE.id) -> None:
    rng = random.Random(0)
    for split, count in (("train", n_train), ("validation", n_other), ("test", n_other)):
        rows: list[Example] = []
        for index in range(count):
            name = f"{split}-{index}"
            said = conversation(rng, index % 2)
            row = Example(name, rule, said, index % 2, split, "toy", name)  # type: ignore[arg-type]
            rows.append(row)
        write_examples(folder / f"{split}.jsonl", rows)


def data(job: Job) -> Rows:
    return load(job.data, job.rule, job.recipe, job.builder)


def mostly_generated(rows: Rows, own_training: int, own_validation: int) -> Rows:
    """All training and validation rows but the last so many are generated."""

    def but_the_last(split: Sequence[Row], own: int) -> tuple[Row, ...]:
        generated = (replace(row, is_generated=True) for row in split[: len(split) - own])
        return (*generated, *split[len(split) - own :])

    train = but_the_last(rows.train, own_training)
    validation = but_the_last(rows.validation, own_validation)
    return replace(rows, train=train, validation=validation)


def with_settings(job: Job, **update: object) -> Job:
    methods = {
        name: settings.model_copy(update=update) for name, settings in job.recipe.methods.items()
    }
    return replace(job, recipe=job.recipe.model_copy(update={"methods": methods}))


def with_lora(job: Job, **lora: object) -> Job:
    return with_settings(job, lora=job.settings.lora | lora)


def weights(model: PeftModel) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in get_peft_model_state_dict(model).items()}


@dataclass
class RankedWeights:
    """Weights that rank the validation rows perfectly and the test rows upside down."""

    rows: Rows
    validation_logits: Sequence[float] = ()

    def logits(self, prompts: Sequence[Prompt]) -> list[float]:
        signs = {id(row.prompt): 2 * row.label - 1 for row in self.rows.validation}
        signs |= {id(row.prompt): 1 - 2 * row.label for row in self.rows.test}
        # Others are of violating validation rows with a long turn.
        return [3.0 * signs.get(id(prompt), 1) for prompt in prompts]

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / PEFT_WEIGHTS).write_bytes(b"weights")
        (folder / PEFT_CONFIG).write_text("{}")
        (folder / WORDS).write_bytes(b"words")


def finish_at_once(job: Job) -> None:
    """Put such weights where the job's belong."""
    rows = data(job)
    finish(job, rows, RankedWeights(rows))


def calls_of(monkeypatch: MonkeyPatch, owner: object, name: str) -> list[tuple[Any, ...]]:
    """The arguments of each call from here on; what is called stays the same."""
    calls: list[tuple[Any, ...]] = []
    original = getattr(owner, name)

    def noted(*args: Any, **more: Any) -> Any:
        calls.append(args)
        return original(*args, **more)

    monkeypatch.setattr(owner, name, noted)
    return calls


def multiply_by_torch(monkeypatch: MonkeyPatch) -> None:
    """From here on PyTorch's own products compute, as where MKL is fast."""
    monkeypatch.setattr(onednn, "is_slow_in_mkl", lambda: False)


def layers_by_onednn(monkeypatch: MonkeyPatch) -> list[nn.Module]:
    """The layers that oneDNN computes from here on, as where MKL is slow, call by call."""
    computed: list[nn.Module] = []
    original = onednn._product

    def product(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        computed.append(layer)
        return original(layer, x)

    monkeypatch.setattr(onednn, "is_slow_in_mkl", lambda: True)
    monkeypatch.setattr(onednn, "_product", product)
    return computed


@pytest.fixture
def make_job(toy_bases: Callable[[str], Path], tmp_path: Path) -> MakeJob:
    def make(
        method: str = "lora",
        *,
        seed: int = 0,
        runs: str = "runs",
        n_train: int = 64,
        base: str = "qwen3",
        **trainer: object,
    ) -> Job:
        folder = toy_bases(base)
        builder = PromptBuilder.from_base(str(folder))
        toy = recipe(folder, **trainer)
        job = Job(RULE, toy, method, seed, builder, Runs(tmp_path / runs))
        if not job.data.exists():
            write_toy_data(job.data, n_train)
        return job

    return make
