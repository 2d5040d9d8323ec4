"""Cached keys and values are those that the base computes for each prefix alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from guard.errors import GuardError
from train.prefix_cache import PrefixCache

PREFIXES = [(5, 6, 7), tuple(range(20, 60)), (9,), tuple(range(100, 117)), (5, 6, 7)]


def llama() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1
    )
    return LlamaForCausalLM(config).eval()


def qwen(toy_base: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(toy_base).eval()  # type: ignore[no-any-return]


@pytest.mark.parametrize("shape", ["qwen", "llama"])
@pytest.mark.parametrize("budget", [10**9, 30_000, 0])
def test_each_row_is_its_prefix_alone_whatever_fits_the_budget(toy_base: Path, shape: str, budget: int) -> None:
    model = llama() if shape == "llama" else qwen(toy_base)
    prefixes = PrefixCache(model, budget)
    prefixes.fill(PREFIXES[:3])
    for chosen in (PREFIXES, PREFIXES[::-1], PREFIXES[2:4]):  # computed, and read again
        cache, real = prefixes.gather(chosen)
        assert real.sum(1).tolist() == [len(prefix) for prefix in chosen]
        for row, prefix in enumerate(chosen):
            with torch.inference_mode():
                alone = model(torch.tensor([prefix]), use_cache=True).past_key_values
            for found, expected in zip(cache, alone, strict=True):
                for states, plain in zip(found[:2], expected[:2], strict=True):
                    torch.testing.assert_close(states[row, :, : len(prefix)], plain[0], rtol=1e-4, atol=1e-5)


def test_no_more_is_kept_than_the_budget(toy_base: Path) -> None:
    prefixes = PrefixCache(qwen(toy_base), 30_000)
    prefixes.fill(PREFIXES)
    assert 0 < sum(states.nbytes for states in prefixes._kept.values()) <= 30_000


def test_a_base_with_sliding_windows_is_refused() -> None:
    config = Gemma3TextConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        sliding_window=8, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    with pytest.raises(GuardError, match="does not keep the keys and values of every position"):
        PrefixCache(Gemma3ForCausalLM(config).eval(), 10**9).gather([(1, 2, 3)])
