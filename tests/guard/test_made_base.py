"""Bases that are made of others once, wherever those come from: of first layers, or in 8 bits."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config

from guard.base_files import folder_digest
from guard.errors import GuardError
from guard.home import ROOT
from guard.made_base import first_layers, gguf_file
from guard.quantized_base import quantized_base
from guard.recipe import Recipe, load_recipe

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A random decoder of four layers, its weights in several files."""
    sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    torch.manual_seed(3)
    folder = tmp_path / "base"
    model = AutoModelForCausalLM.from_config(Qwen3Config(**sizes, **heads), dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="200KB")
    for name in ("tokenizer.json", "chat_template.jinja"):
        (folder / name).write_bytes((ROOT / "recipes/models/tiny" / name).read_bytes())
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def cut(base: Path, layers: int) -> Path:
    return first_layers(base, folder_digest(base, "recipe toy"), layers, "recipe toy")


def test_the_first_layers_compute_what_they_compute_in_the_whole(base: Path) -> None:
    whole: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    whole.model.layers = whole.model.layers[:3]
    folder = cut(base, 3)
    first = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.randint(0, 300, (2, 30), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        assert torch.equal(first(tokens).logits, whole(tokens, use_cache=False).logits)
    assert first.config.layer_types == ["full_attention"] * 3
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (folder / name).read_bytes() == (base / name).read_bytes()


def test_a_base_of_fewer_layers_is_refused_and_leaves_nothing(base: Path, own_cache: Path) -> None:
    with pytest.raises(GuardError, match=r"layers: the base has fewer .*got 5.*State 1 to 4"):
        cut(base, 5)
    assert [path for path in own_cache.iterdir() if path.suffix != ".lock"] == []


def test_it_is_made_once_and_anew_when_the_base_changes_or_a_process_was_killed(base: Path) -> None:
    made = cut(base, 2)
    weights = made / "model.safetensors"
    time, content = weights.stat().st_mtime_ns, weights.read_bytes()
    assert cut(base, 2) == made and weights.stat().st_mtime_ns == time
    part = made.with_name(f"{made.name}.part")
    made.rename(part)
    (part / "model.safetensors").write_bytes(content[:100])
    (part / "old.json").touch()
    assert cut(base, 2) == made
    assert weights.read_bytes() == content and not (made / "old.json").exists()
    (base / "config.json").write_text((base / "config.json").read_text() + "\n")
    assert len({made, cut(base, 2), cut(base, 3)}) == 3


def _cut_in_another_process(arguments: tuple[Path, Path]) -> str:
    import guard.made_base

    base, guard.made_base.CACHE = arguments
    return str(cut(base, 2))


def test_several_processes_make_one(base: Path, own_cache: Path) -> None:
    with multiprocessing.get_context("fork").Pool(3) as pool:
        made = set(pool.map(_cut_in_another_process, [(base, own_cache)] * 3))
    assert len(made) == 1
    assert (Path(made.pop()) / "model.safetensors").is_file()


def test_a_recipe_of_a_decoder_states_the_layers(own_cache: Path) -> None:
    tiny = load_recipe("tiny")
    recipe = Recipe.model_validate(tiny.model_dump() | {"name": "toy", "layers": 4})
    assert Path(recipe.base_path).parent == own_cache
    assert recipe.commit is None and recipe.base_revision != tiny.base_revision
    with pytest.raises(ValueError, match="`layers` is for decoders"):
        Recipe.model_validate(load_recipe("minilm").model_dump() | {"layers": 2})


def quantized(base: Path, name: str) -> dict[str, torch.Tensor]:
    made = quantized_base(base, folder_digest(base, "recipe toy"), name, "recipe toy")
    return load_file(made / "model.safetensors")


@pytest.mark.parametrize(("name", "kind", "largest"), [("int8", "int", 127), ("fp8", "float", 448)])
def test_linear_layers_are_rounded_by_channel_and_the_rest_stays(
    base: Path, own_cache: Path, name: str, kind: str, largest: float
) -> None:
    whole, made = AutoModelForCausalLM.from_pretrained(base).state_dict(), quantized(base, name)
    scales = {key: made.pop(f"{key}_scale") for key in whole if f"{key}_scale" in made}
    assert len(scales) == 4 * 7 and whole.keys() == made.keys()
    assert all(torch.equal(made[key], whole[key]) for key in made.keys() - scales.keys())
    for key, scale in scales.items():
        levels, scaled = made[key], whole[key].float() * (1 / scale)
        assert set(levels.float().abs().amax(1).tolist()) == {largest}
        nearest = scaled.round() if kind == "int" else scaled
        assert torch.equal(levels.float(), nearest.to(levels.dtype).float())
    (path,) = own_cache.glob("*/config.json")
    stated = json.loads(path.read_text()).pop("quantization_config")
    (group,) = QuantizationConfig.model_validate(stated).config_groups.values()
    assert (stated["ignore"], group.targets) == (["lm_head"], ["Linear"])
    for arguments, strategy in ((group.weights, "channel"), (group.input_activations, "token")):
        assert (arguments.type, arguments.num_bits, arguments.strategy) == (kind, 8, strategy)
        assert arguments.symmetric and bool(arguments.dynamic) == (strategy == "token")


def test_of_a_base_in_8_bits_a_tensor_at_a_time_is_in_memory(base: Path) -> None:
    tracemalloc.start()
    quantized_base(base, "its digest", "int8", "recipe toy")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 240_000, "float32 copies of a tensor, and not the base, which has 322,000"


def test_a_full_disk_leaves_nothing(
    base: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("guard.quantized_base._levels_and_scales", full)  # amidst the file
    with pytest.raises(GuardError, match=r"cannot be made: No space left.*XDG_CACHE_HOME"):
        quantized(base, "int8")
    monkeypatch.setattr("guard.base_weights._LAYER", re.compile("gpt_neox"))
    with pytest.raises(GuardError, match=r"toy: serving_quantization: .*no linear layers called"):
        quantized(base, "int8")
    assert [path for path in own_cache.iterdir() if path.suffix != ".lock"] == []


@pytest.mark.parametrize(
    ("base", "problem"),
    [
        ("gguf:nowhere/model.gguf", "no such GGUF file .*got gguf:nowhere/model.gguf"),
        ("gguf:package:numpy/model.gguf", "no such GGUF file"),
        ("gguf:package:not_installed/model.gguf", "not installed .*Run `make setup`"),
        ("gguf:org/name/b.gguf", r"cannot be had: .*got org/name/b\.gguf"),
    ],
)
def test_a_gguf_file_of_the_hub_is_found_in_its_cache_and_one_that_is_not_there_is_refused(
    base: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models--org--name"
    for file in (f"snapshots/{'c' * 40}/a.gguf", "refs/main"):
        (folder / file).parent.mkdir(parents=True)
        (folder / file).write_text("c" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    found = gguf_file("gguf:org/name/a.gguf", None, ROOT, "recipe toy")
    assert found == folder / "snapshots" / ("c" * 40) / "a.gguf"
    with pytest.raises(GuardError, match=f"recipe toy: base: .*{problem}"):
        gguf_file(base, None, ROOT, "recipe toy")
