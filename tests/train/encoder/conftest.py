"""A toy encoder of two layers behind MiniLM's tokenizer, and jobs on it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel

from guard.layout import Runs
from guard.prompt.encoder import EncoderPromptBuilder
from guard.recipe import Recipe, load_recipe
from guard.rule import Judged, Turns
from tests.train.conftest import RULE, write_toy_data
from train.job import Job

WINDOW = 32
MakeEncoderJob = Callable[..., Job]


@pytest.fixture(scope="session")
def toy_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy_encoder")
    torch.manual_seed(0)
    shape = BertConfig(
        vocab_size=30522,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    BertModel(shape, add_pooling_layer=False).save_pretrained(folder)
    shutil.copy(Path(load_recipe("minilm").base_path) / "tokenizer.json", folder)
    return folder


def encoder_recipe(base: Path, **trainer: object) -> Recipe:
    shared = {"max_steps": 20, "eval_steps": 10, "per_device_train_batch_size": 8}
    shared |= {"learning_rate": 1e-2}
    return Recipe.model_validate(
        {
            "name": "toy",
            "kind": "encoder",
            "base": str(base),
            "dtype": "float32",
            "context_tokens": 512,
            "window_tokens": WINDOW,
            "rule_turn": "none",
            "trainer": shared | trainer,
            "methods": {
                "lora": {"lora": {"r": 4, "lora_alpha": 8, "target_modules": ["query", "dense"]}},
                "head": {},
            },
            "engine": {"max_lora_rank": 16},
        }
    )


@pytest.fixture
def make_encoder_job(toy_encoder: Path, tmp_path: Path) -> MakeEncoderJob:
    def make(
        method: str = "lora",
        *,
        seed: int = 0,
        runs: str = "runs",
        n_train: int = 64,
        patience: int | None = None,
        min_steps: int | None = None,
        lora_dropout: float = 0.0,
        judged: Judged = "conversation",
        turns: Turns = "any",
        **trainer: object,
    ) -> Job:
        recipe = encoder_recipe(toy_encoder, **trainer)
        adapter = recipe.methods["lora"].lora | {"lora_dropout": lora_dropout}
        changed = {"lora": adapter, "early_stopping_patience": patience, "min_steps": min_steps}
        settings = recipe.methods["lora"].model_copy(update=changed)
        recipe = recipe.model_copy(update={"methods": recipe.methods | {"lora": settings}})
        builder = EncoderPromptBuilder.of(recipe)
        rule = RULE.model_copy(update={"judged": judged, "turns": turns})
        job = Job(rule, recipe, method, seed, builder, Runs(tmp_path / runs))
        if not job.data.exists():
            write_toy_data(job.data, n_train)
        return job

    return make
