"""What the training benchmarks train: rows of stated lengths, jobs without data."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from guard.prompt.decoder import PromptBuilder
from guard.recipe import MODELS, load_recipe
from train.bench.workload import (
    RANDOM_25M,
    RANDOM_BASES,
    SUFFIX,
    job_of,
    pool,
    random_rows,
)

BUILDER = PromptBuilder.from_base(str(MODELS / "tiny"))


def test_rows_have_the_stated_lengths_and_one_rule_turn() -> None:
    header = BUILDER.invocation("a rule")
    for row, length in zip(random_rows(BUILDER, [40, 90]), [40, 90], strict=True):
        assert row.prompt.invocation_start == length
        assert len(row.prompt.token_ids) == length + SUFFIX
        assert row.prompt.token_ids[length : length + len(header)] == tuple(header)


def test_the_pool_is_as_long_as_conversations_are() -> None:
    lengths = sorted(row.prompt.invocation_start for row in pool(BUILDER, 400))
    assert 250 < lengths[200] < 350
    assert 40 <= lengths[0] < 100
    assert 1000 < lengths[-1] <= 2000


def test_a_job_is_the_tiny_recipes_with_settings_of_its_own(tmp_path: Path) -> None:
    job = job_of("tiny", tmp_path, max_steps=7)
    assert (job.method, job.trainer["max_steps"], job.recipe.name) == ("alora", 7, "tiny")
    assert job.data.is_relative_to(tmp_path)
    assert [file.stat().st_size for file in sorted(job.data.iterdir())] == [0, 0, 0]
    assert job.inputs


def test_the_narrow_base_has_the_layers_of_qwen3_4b_and_trains_as_its_recipe_says(
    tmp_path: Path,
) -> None:
    job = job_of("narrow-4B", tmp_path)
    config = json.loads((Path(job.recipe.base_path) / "config.json").read_text(encoding="utf-8"))
    heads = config["num_attention_heads"], config["num_key_value_heads"]
    assert (config["num_hidden_layers"], heads) == (36, (32, 8))
    like = load_recipe("qwen3-4b")
    assert job.lora == like.settings("alora").lora
    assert job.recipe.dtype == like.dtype == "bfloat16"


def test_a_base_of_another_shape_is_another_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    small = RANDOM_25M | {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    widths = []
    for width in (32, 64):
        monkeypatch.setitem(RANDOM_BASES, "25M", small | {"intermediate_size": width})
        base = job_of("25M", tmp_path / str(width)).recipe.base_path
        config = json.loads((Path(base) / "config.json").read_text(encoding="utf-8"))
        widths.append(config["intermediate_size"])
    assert widths == [32, 64]


def test_the_larger_base_is_made_once_and_has_the_tiny_ones_tokenizer(tmp_path: Path) -> None:
    job = job_of("25M", tmp_path / "first")
    weights = Path(job.recipe.base_path) / "model.safetensors"
    made = weights.stat().st_mtime_ns
    assert 2.4e7 < weights.stat().st_size / 4 < 2.7e7
    assert job.builder.hash == BUILDER.hash
    job_of("25M", tmp_path / "second")
    assert weights.stat().st_mtime_ns == made
