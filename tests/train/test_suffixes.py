"""Suffixes on cached prefixes score as whole prompts do, however many share a prefix."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedModel

from guard.errors import GuardError
from train.prefix_cache import Budget, PrefixCache
from train.suffixes import Prefixes, attend_to_prefixes, scores

from .conftest import BASES

PREFIXES = [40, 7, 23]
SUFFIXES = [9, 12, 4, 12, 12, 1, 5, 6, 7, 8, 2, 12]


def tokens(length: int, seed: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(10, 10_000), k=length))


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(("branches", "at_a_time"), [(1, 2**25), (4, 2**25), (4, 2 * 4 * 12 * 40)])
def test_scores_and_gradients_are_those_of_whole_prompts(monkeypatch: pytest.MonkeyPatch, base: str, branches: int, at_a_time: int) -> None:
    monkeypatch.setattr("train.suffixes.SCORES", at_a_time)  # the last: two suffixes of the longest prefix
    torch.manual_seed(0)
    model = BASES[base]().eval()
    prefixes = [tokens(length, length) for length in PREFIXES]
    suffixes = [tokens(length, 100 + index) for index, length in enumerate(SUFFIXES[: branches * len(prefixes)])]
    norm = model.get_parameter("model.norm.weight")
    key = model.get_parameter("model.layers.1.self_attn.k_proj.weight")  # of a token's own keys only: those of prefixes are constants

    plain = torch.cat([model(torch.tensor([[*prefixes[index % 3], *suffix]])).logits[:, -1] for index, suffix in enumerate(suffixes)])
    (expected,) = torch.autograd.grad(plain.square().mean(), norm)

    attend_to_prefixes(model)
    cached = PrefixCache(model, Budget()).read(prefixes)
    found = scores(model, Prefixes(cached, [index % 3 for index in range(len(suffixes))]), suffixes)
    gradient, of_keys = torch.autograd.grad(found.square().mean(), (norm, key))
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-4)
    assert of_keys.abs().max() > 0


def test_in_bfloat16_scores_differ_from_those_of_whole_prompts_by_no_more_than_its_noise() -> None:
    torch.manual_seed(0)
    model = BASES["qwen3"]().eval()
    prefixes, suffixes = [tokens(40, 0), tokens(300, 1)], [tokens(9, 2), tokens(12, 3)]
    whole = [torch.tensor([[*prefix, *suffix]]) for prefix, suffix in zip(prefixes, suffixes, strict=True)]
    exact = torch.cat([model(each).logits[:, -1] for each in whole])
    model = model.to(torch.bfloat16)
    plain = torch.cat([model(each).logits[:, -1] for each in whole]).float()
    attend_to_prefixes(model)
    with torch.autocast("cpu", torch.bfloat16):
        found = scores(model, Prefixes(PrefixCache(model, Budget()).read(prefixes), [0, 1]), suffixes).float()
    assert (found - exact).abs().max() < 1.5 * (plain - exact).abs().max()


def test_without_prefixes_attention_is_what_it_was() -> None:
    torch.manual_seed(0)
    model = BASES["qwen3"]().eval()
    ids, mask = torch.randint(10, 1000, (2, 12)), torch.tensor([[0] * 5 + [1] * 7, [1] * 12])
    plain = model(ids, attention_mask=mask).logits[:, -1]
    attend_to_prefixes(model)
    torch.testing.assert_close(model(ids, attention_mask=mask).logits[:, -1], plain)


def test_a_base_whose_attention_is_not_plain_is_refused() -> None:
    config = GptOssConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
                          num_key_value_heads=1, head_dim=8, num_local_experts=2, layer_types=["full_attention"] * 2)  # fmt: skip
    with pytest.raises(ValueError, match="attention"):
        attend_to_prefixes(GptOssForCausalLM(config))


def test_a_base_that_does_not_hand_on_the_prefixes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = BASES["llama, one KV head"]().eval()
    attend_to_prefixes(model)
    states = PrefixCache(model, Budget()).read([(5, 6)])
    layer = model.model.layers[1].self_attn
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda *args, prefixes, **more: forward(*args, **more | {"attention_mask": None}))
    with pytest.raises(GuardError, match="cannot be given the keys and values of a prefix"):
        scores(model, Prefixes(states, [0]), [(7, 8)])


def test_what_a_model_adds_to_plain_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model: PreTrainedModel = BASES["qwen3"]().eval()
    attend_to_prefixes(model)
    states = PrefixCache(model, Budget()).read([(5, 6)])
    monkeypatch.setattr(model.model.layers[0].self_attn, "sliding_window", 8)
    with pytest.raises(GuardError, match="cannot be given the keys and values of a prefix"):
        scores(model, Prefixes(states, [0]), [(7, 8)])
