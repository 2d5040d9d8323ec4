"""Bases that are made of others: of first layers, once, wherever the other one comes from."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from guard.base_files import folder_digest
from guard.errors import GuardError
from guard.home import ROOT
from guard.made_base import first_layers, gguf_file
from guard.recipe import Recipe, load_recipe

SHARDED = "200KB"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("guard.made_base.CACHE", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A random decoder of four layers, its weights in several files."""
    config = Qwen3Config(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    torch.manual_seed(3)
    folder = tmp_path / "base"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=SHARDED)
    for name in ("tokenizer.json", "chat_template.jinja"):
        (folder / name).write_bytes((ROOT / "recipes/models/tiny" / name).read_bytes())
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def cut(base: Path, layers: int) -> Path:
    return first_layers(base, folder_digest(base, "recipe toy"), layers, "recipe toy")


def test_the_first_layers_compute_what_they_compute_in_the_whole(base: Path) -> None:
    whole: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    whole.model.layers = whole.model.layers[:3]
    first = AutoModelForCausalLM.from_pretrained(cut(base, 3), dtype=torch.float32)
    tokens = torch.randint(0, 300, (2, 30), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        assert torch.equal(first(tokens).logits, whole(tokens, use_cache=False).logits)
    assert first.config.layer_types == ["full_attention"] * 3


def test_what_a_base_has_besides_weights_comes_along(base: Path) -> None:
    folder = cut(base, 2)
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (folder / name).read_bytes() == (base / name).read_bytes()
    assert folder_digest(folder, "recipe toy") != folder_digest(base, "recipe toy")


def test_a_base_of_fewer_layers_is_refused_and_leaves_nothing(base: Path, cache: Path) -> None:
    with pytest.raises(GuardError, match=r"layers: the base has fewer .*got 5.*State 1 to 4"):
        cut(base, 5)
    assert [path for path in cache.iterdir() if path.suffix != ".lock"] == []


def test_it_is_made_once_and_anew_when_the_base_changes(base: Path) -> None:
    made = cut(base, 2)
    time = (made / "model.safetensors").stat().st_mtime_ns
    assert cut(base, 2) == made
    assert (made / "model.safetensors").stat().st_mtime_ns == time
    (base / "config.json").write_text((base / "config.json").read_text() + "\n")
    assert cut(base, 2) != made
    assert cut(base, 3) != made


def test_what_a_killed_process_left_is_made_anew(base: Path, cache: Path) -> None:
    made = cut(base, 2)
    content = (made / "model.safetensors").read_bytes()
    part = made.with_name(f"{made.name}.part")
    made.rename(part)
    (part / "model.safetensors").write_bytes(content[:100])
    (part / "old.json").touch()
    assert cut(base, 2) == made
    assert (made / "model.safetensors").read_bytes() == content
    assert not (made / "old.json").exists()


def _cut_in_another_process(arguments: tuple[Path, Path]) -> str:
    import guard.made_base

    base, guard.made_base.CACHE = arguments
    return str(cut(base, 2))


def test_several_processes_make_one(base: Path, cache: Path) -> None:
    with multiprocessing.get_context("fork").Pool(3) as pool:
        made = set(pool.map(_cut_in_another_process, [(base, cache)] * 3))
    assert len(made) == 1
    assert (Path(made.pop()) / "model.safetensors").is_file()


def recipe_of(**changes: object) -> Recipe:
    return Recipe.model_validate(load_recipe("tiny").model_dump() | {"name": "toy"} | changes)


def test_a_recipe_states_the_layers(cache: Path) -> None:
    recipe = recipe_of(layers=4)
    assert Path(recipe.base_path).parent == cache
    assert recipe.commit is None
    assert recipe.base_revision != load_recipe("tiny").base_revision


def test_layers_are_a_decoders() -> None:
    with pytest.raises(ValueError, match="`layers` is for decoders"):
        Recipe.model_validate(load_recipe("minilm").model_dump() | {"layers": 2})


@pytest.mark.parametrize(
    ("base", "problem"),
    [
        ("gguf:nowhere/model.gguf", "no such GGUF file .*got gguf:nowhere/model.gguf"),
        ("gguf:package:numpy/model.gguf", "no such GGUF file"),
        ("gguf:package:not_installed/model.gguf", "not installed .*Run `make setup`"),
    ],
)
def test_a_gguf_file_that_is_not_there_is_refused(base: str, problem: str) -> None:
    with pytest.raises(GuardError, match=f"recipe toy: base: .*{problem}"):
        gguf_file(base, None, ROOT, "recipe toy")


def test_a_gguf_file_of_the_hub_is_found_in_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "hub" / "models--org--name"
    snapshot = folder / "snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "a.gguf").touch()
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("c" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert gguf_file("gguf:org/name/a.gguf", None, ROOT, "recipe toy") == snapshot / "a.gguf"
    with pytest.raises(GuardError, match=r"cannot be had: .*got org/name/b\.gguf"):
        gguf_file("gguf:org/name/b.gguf", None, ROOT, "recipe toy")
