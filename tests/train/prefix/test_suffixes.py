"""Logits and gradients of suffixes on cached prefixes are those of whole prompts.

However many suffixes share a prefix.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from transformers import (
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
)

from guard.errors import GuardError
from tests.train.conftest import BASES, SHAPE, LaunchCount
from train.prefix.cache import Budget, Prefix, PrefixCache
from train.prefix.prefixes import MAX_WEIGHTS, Prefixes
from train.prefix.suffixes import _ToPrefixes, attend_to_prefixes, logits

PREFIXES = [40, 7, 23]
SUFFIXES = [9, 12, 4, 12, 12, 1, 5, 6, 7, 8, 2, 12]
FIRST_OF_SUFFIXES = 5000  # the token ids from here on stand in suffixes only


def tokens(length: int, seed: int, of: range) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(of, k=length))


def attend(model: PreTrainedModel) -> None:
    attend_to_prefixes(model, lambda prefix: PrefixCache(model, Budget()).read([tuple(prefix)])[0])


def prompts() -> tuple[list[Prefix], list[Prefix], list[int]]:
    """Prefixes, suffixes, and the prefix of each."""
    prefixes = [tokens(length, length, range(10, FIRST_OF_SUFFIXES)) for length in PREFIXES]
    found = []
    for index, length in enumerate(SUFFIXES):
        found.append(tokens(length, 100 + index, range(FIRST_OF_SUFFIXES, 10_000)))
    # Not in their order, not in equal parts.
    return prefixes, found, [(index * index) % len(prefixes) for index in range(len(SUFFIXES))]


def whole(model: PreTrainedModel, prefixes: Any, suffixes: Any, stands_on: Any) -> torch.Tensor:
    logits: list[torch.Tensor] = []
    for index, suffix in zip(stands_on, suffixes, strict=True):
        logits.append(model(torch.tensor([[*prefixes[index], *suffix]])).logits[:, -1])
    return torch.cat(logits)


def of_suffixes(model: PreTrainedModel, found: torch.Tensor) -> torch.Tensor:
    """The gradient of the suffixes' own embeddings.

    It goes through every layer's attention to the prefix and to the suffix.
    """
    (gradient,) = torch.autograd.grad(
        found.float().square().mean(), model.get_input_embeddings().weight
    )  # type: ignore[call-overload]
    return gradient[FIRST_OF_SUFFIXES:].float()  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("at_a_time", [MAX_WEIGHTS, 2 * 4 * 12 * 40])  # two of the longest prefix
def test_logits_and_gradients_are_those_of_whole_prompts(
    monkeypatch: MonkeyPatch, base: str, at_a_time: int, in_place: bool
) -> None:
    monkeypatch.setattr("train.prefix.prefixes.MAX_WEIGHTS", at_a_time)
    torch.manual_seed(0)
    model = BASES[base]().eval()
    prefixes, suffixes, stands_on = prompts()
    plain = whole(model, prefixes, suffixes, stands_on)
    expected = of_suffixes(model, plain)
    attend(model)
    states = PrefixCache(model, Budget()).read(prefixes)
    found = logits(model, Prefixes(states, stands_on, in_place=in_place), suffixes)
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4)
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(
        of_suffixes(model, found), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())
    )


@pytest.mark.parametrize("in_place", [True, False])
def test_bfloat16_is_no_further_off_than_on_whole_prompts(in_place: bool) -> None:
    torch.manual_seed(0)
    model = BASES["qwen3"]().eval()
    prefixes, suffixes, stands_on = prompts()
    exact = whole(model, prefixes, suffixes, stands_on)
    exact_gradient = of_suffixes(model, exact)
    model = model.to(torch.bfloat16)
    plain = whole(model, prefixes, suffixes, stands_on)
    plain_gradient = of_suffixes(model, plain)
    attend(model)
    states = PrefixCache(model, Budget()).read(prefixes)
    with torch.autocast("cpu", torch.bfloat16):
        found = logits(model, Prefixes(states, stands_on, in_place=in_place), suffixes)
    gradient = of_suffixes(model, found)
    assert (found - exact).norm() < 1.25 * (plain - exact).norm()
    assert (gradient - exact_gradient).norm() < 1.25 * (plain_gradient - exact_gradient).norm()


Attended = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def attention(query: torch.Tensor, prefixes: Prefixes) -> Attended:
    """Attention to the prefixes in layers 0 to 2 and back, its normaliser, the queries' gradient.

    The gradient is that of a fixed random function of both, the same for queries of one shape.
    """
    query = query.clone().requires_grad_()
    layers = [_ToPrefixes.apply(query, prefixes, layer) for layer in range(3)]
    attended = torch.stack([attended for attended, _ in layers]).float()
    normaliser = torch.stack([normaliser for _, normaliser in layers])
    generator = torch.Generator().manual_seed(7)
    total = torch.tensor(0.0)
    for result in (attended, normaliser):
        total = total + (result * torch.randn(result.shape, generator=generator)).sum()
    (gradient,) = torch.autograd.grad(total, query)
    return attended.detach(), normaliser.detach(), gradient.float()


def random_pass(
    lengths: Sequence[int], stands_on: Sequence[int], seed: int, dtype: torch.dtype
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Queries of four heads to each of two KV heads at five positions; states of three layers."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(len(stands_on), 2, 4 * 5, 8, generator=generator)
    states = [torch.randn(3, 2, 2, length, 8, generator=generator) for length in lengths]
    return query.to(dtype), [of_prefix.to(dtype) for of_prefix in states]


def by_formula(
    query: torch.Tensor, states: Sequence[torch.Tensor], stands_on: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and the logarithm of its normaliser in float64, suffix by suffix."""
    attended, normaliser = [], []
    for layer in range(3):
        for suffix, prefix in enumerate(stands_on):
            keys, values = states[prefix][layer].double()
            scores = query[suffix].double() @ keys.transpose(1, 2)
            attended.append(scores.softmax(dim=2) @ values)
            normaliser.append(scores.logsumexp(dim=2))
    shape = (3, len(stands_on), *query.shape[1:])
    return torch.stack(attended).view(shape), torch.stack(normaliser).view(shape[:-1])


@pytest.mark.parametrize("copied_bytes", [1, 2**30])  # a layer, all layers
@pytest.mark.parametrize("most_weights", [3000, 2**25])
@pytest.mark.parametrize("seed", range(3))
def test_padded_attention_is_that_in_place_on_prefixes_of_very_unlike_lengths(
    monkeypatch: MonkeyPatch, seed: int, most_weights: int, copied_bytes: int
) -> None:
    monkeypatch.setattr("train.prefix.prefixes.MAX_WEIGHTS", most_weights)
    monkeypatch.setattr("train.prefix.prefixes.COPIED_BYTES", copied_bytes)
    rng = random.Random(seed)
    lengths = [1, 300, *[rng.randint(1, 300) for _ in range(10)]]
    stands_on = [*range(12), *rng.choices(range(12), k=14)]
    rng.shuffle(stands_on)
    query, states = random_pass(lengths, stands_on, seed, torch.float32)
    padded = attention(query, Prefixes(states, stands_on, in_place=False))
    in_place = attention(query, Prefixes(states, stands_on, in_place=True))
    for result, expected in zip(padded, in_place, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    for result, expected in zip(padded, by_formula(query, states, stands_on), strict=False):
        torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-5)


def test_launches_of_padded_attention_are_few_and_do_not_grow_with_the_conversations() -> None:
    def launches(conversations: int, *, in_place: bool) -> int:
        lengths = [(60, 55, 200, 190)[index % 4] for index in range(conversations)]
        stands_on = list(range(conversations))
        query, states = random_pass(lengths, stands_on, 0, torch.bfloat16)
        with LaunchCount() as count:
            attention(query, Prefixes(states, stands_on, in_place=in_place))
        return count.launches

    assert launches(8, in_place=False) == launches(64, in_place=False) < 250
    assert launches(64, in_place=True) > 7 * launches(8, in_place=True)
    assert launches(64, in_place=True) > 10 * launches(64, in_place=False)


def test_nothing_that_grows_with_the_prefix_is_kept_for_the_backward_pass() -> None:
    model = BASES["qwen3"]().eval()
    attend(model)

    def kept(length: int) -> int:
        sizes: dict[int, int] = {}
        states = PrefixCache(model, Budget()).read([tokens(length, 0, range(10, 100))])
        with torch.autograd.graph.saved_tensors_hooks(
            lambda saved: sizes.setdefault(saved.data_ptr(), saved.nbytes) and saved, lambda _: _
        ):
            logits(model, Prefixes(states, [0]), [tokens(12, 1, range(10, 100))])
        return sum(sizes.values())

    assert kept(20) == kept(200)


def test_without_prefixes_attention_is_what_it_was() -> None:
    torch.manual_seed(0)
    model = BASES["qwen3"]().eval()
    ids, mask = torch.randint(10, 1000, (2, 12)), torch.tensor([[0] * 5 + [1] * 7, [1] * 12])
    plain = model(ids, attention_mask=mask).logits[:, -1]
    attend(model)
    torch.testing.assert_close(model(ids, attention_mask=mask).logits[:, -1], plain)


REFUSED = "cannot be given the keys and values of a prefix"


def test_a_base_of_other_attention_is_refused() -> None:
    """Transformers gives the one no such attention, and the other does more with what it keeps."""
    small = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    config = GptOssConfig(**small, num_local_experts=2, layer_types=["full_attention"] * 2)
    with pytest.raises(ValueError, match="attention"):
        attend(GptOssForCausalLM(config))
    torch.manual_seed(0)
    with pytest.raises(GuardError, match=rf"{REFUSED} \(got logits off by"):
        attend(DiffLlamaForCausalLM(DiffLlamaConfig(**SHAPE)).eval())


@pytest.mark.parametrize("ignored", ["prefixes", "position_ids"])
def test_a_base_deaf_to_a_pass_is_refused(monkeypatch: MonkeyPatch, ignored: str) -> None:
    torch.manual_seed(0)
    model = BASES["llama, one KV head"]().eval()
    forward = model.forward

    def deaf(*args: Any, **more: Any) -> Any:
        more.pop(ignored, None)
        return forward(*args, **more)

    monkeypatch.setattr(model, "forward", deaf)
    with pytest.raises(GuardError, match=REFUSED):
        attend(model)


def test_an_addition_to_plain_attention_is_refused(monkeypatch: MonkeyPatch) -> None:
    model: PreTrainedModel = BASES["qwen3"]().eval()
    monkeypatch.setattr(model.model.layers[0].self_attn, "sliding_window", 8)
    with pytest.raises(GuardError, match=rf"{REFUSED} \(got sliding_window"):
        attend(model)
