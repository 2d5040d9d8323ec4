"""Logits and gradients of suffixes on cached prefixes are those of whole prompts.

However many suffixes share a prefix, and in whatever products. Adapters of several jobs share a
layer.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from peft import LoraConfig
from pytest import MonkeyPatch
from torch import nn
from transformers import (
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from guard.errors import GuardError
from tests.train.conftest import BASES, SHAPE, LaunchCount
from train.prefix import prefixes
from train.prefix.cache import Budget, Prefix, PrefixCache
from train.prefix.prefixes import MAX_WEIGHTS, PADDING, Part, Prefixes, joined_parts, separate_parts
from train.prefix.stacked import Stacked, StackedModel, layers
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


@pytest.mark.parametrize("ignored", ["prefixes", "position_ids", "nothing"])
def test_a_base_that_adds_or_ignores_something_is_refused(
    monkeypatch: MonkeyPatch, ignored: str
) -> None:
    torch.manual_seed(0)
    model: PreTrainedModel = BASES["llama, one KV head"]().eval()
    forward, told = model.forward, REFUSED
    if ignored == "nothing":
        monkeypatch.setattr(model.model.layers[0].self_attn, "sliding_window", 8, raising=False)
        told = rf"{REFUSED} \(got sliding_window"

    def deaf(*args: Any, **more: Any) -> Any:
        more.pop(ignored, None)
        return forward(*args, **more)

    monkeypatch.setattr(model, "forward", deaf)
    with pytest.raises(GuardError, match=told):
        attend(model)


WEIGHTS = 8 * 4 * 24  # of a suffix at a token: KV heads, heads on each, tokens


def random_lengths(count: int) -> list[int]:
    rng = random.Random(count)
    lengths = [300 * rng.lognormvariate(0, 0.6) for _ in range(count)]
    return [round(min(2000, max(40, length))) for length in lengths]


def both_parts(lengths: list[int], readers: list[int]) -> tuple[list[Part], list[Part]]:
    """Separate and joined, for so many readers of each prefix."""
    suffixes_on, first = [], 0
    for count in readers:
        suffixes_on.append(list(range(first, first + count)))
        first += count
    separate = separate_parts(lengths, suffixes_on, WEIGHTS)
    return separate, joined_parts(lengths, separate, WEIGHTS)


def padded_tokens(part: Part, lengths: list[int]) -> int:
    longest = max(lengths[prefix] for prefix in part.prefixes)
    return longest * len(part.prefixes) * part.readers


def needed_tokens(part: Part, lengths: list[int]) -> int:
    pairs = zip(part.prefixes, part.suffixes, strict=True)
    return sum(lengths[prefix] * len(set(suffixes)) for prefix, suffixes in pairs)


@pytest.mark.parametrize(
    ("most_readers", "most_weights"), [(1, 2**25), (12, 2**25), (12, 2000 * WEIGHTS)]
)
def test_joined_parts_are_few_waste_little_and_hold_all_suffixes(
    monkeypatch: MonkeyPatch, most_readers: int, most_weights: int
) -> None:
    """A prefix of too many readers is read in parts."""
    monkeypatch.setattr(prefixes, "MAX_WEIGHTS", most_weights)
    rng = random.Random(0)
    lengths = random_lengths(100)
    readers = [rng.randint(1, most_readers) for _ in lengths]
    separate, joined = both_parts(lengths, readers)
    pairs = {(part.prefixes[0], suffix) for part in separate for suffix in part.suffixes[0]}
    assert len(pairs) == sum(readers)
    held = []
    for part in joined:
        assert {len(suffixes) for suffixes in part.suffixes} == {part.readers}
        assert padded_tokens(part, lengths) <= PADDING * needed_tokens(part, lengths)
        assert padded_tokens(part, lengths) * WEIGHTS <= most_weights
        for prefix, suffixes in zip(part.prefixes, part.suffixes, strict=True):
            held += [(prefix, suffix) for suffix in set(suffixes)]
    assert sorted(held) == sorted(pairs)
    assert len(joined) < len(separate)


@pytest.mark.parametrize(("device", "in_place"), [("cpu", True), ("meta", False)])
def test_prefixes_are_read_in_place_on_a_cpu_alone(device: str, in_place: bool) -> None:
    states = [torch.empty(2, 2, 2, length, 8, device=device) for length in (5, 9)]
    assert Prefixes(states, [0, 1]).in_place == in_place
    assert Prefixes(states, [0, 1], in_place=not in_place).in_place != in_place


@pytest.mark.parametrize(("copied_bytes", "layers"), [(2**30, 3), (1, 1)])
def test_copies_are_made_by_room(monkeypatch: MonkeyPatch, copied_bytes: int, layers: int) -> None:
    monkeypatch.setattr(prefixes, "COPIED_BYTES", copied_bytes)
    states = [torch.randn(3, 2, 2, length, 8) for length in (9, 10)]
    of_pass = Prefixes(states, [0, 1], in_place=False)
    of_pass.arrange(tokens=4)
    for layer in (0, 1, 2, 1, 0):  # forward, backward
        ((_, keys, _),) = of_pass.products(layer)
        assert torch.equal(keys.view(2, 2, 10, 8)[:, 1, :9], states[0][layer, 0])
        assert len(of_pass._copied) == layers


WHERE = "recipe toy: methods.second.lora"


@pytest.fixture
def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE)).eval().requires_grad_(False)


def config(rank: int, *modules: str, scaling: int = 3) -> LoraConfig:
    return LoraConfig(
        r=rank, lora_alpha=scaling * rank, target_modules=list(modules), init_lora_weights=False
    )


def test_a_layer_of_many_adapters_launches_no_more_than_one_of_two(model: Qwen3ForCausalLM) -> None:
    base = model.get_submodule("model.layers.0.self_attn.q_proj")
    StackedModel(model, [config(4, "q_proj")] * 8, list(range(8)), [WHERE] * 8)
    layer = model.get_submodule("model.layers.0.self_attn.q_proj")
    assert isinstance(layer, Stacked)

    def launches(adapters: int) -> int:
        layer.acting = range(adapters)
        with LaunchCount() as count:
            layer(torch.randn(8, 3, 64)).square().sum().backward()
        for adapter in layer.acting:
            a, b = layer.factors[adapter]
            assert a.grad is not None and b.grad is not None
            a.grad = b.grad = None
        return count.launches

    assert launches(8) == launches(2)
    assert isinstance(base, nn.Linear) and base.weight.grad is None


def test_the_layers_of_an_adapter_are_counted_and_the_base_stays(model: Qwen3ForCausalLM) -> None:
    """A layer that is not linear is refused."""
    counts = layers(model, config(4, "q_proj"), WHERE)
    name = "model.layers.{}.self_attn.q_proj"
    assert counts == {name.format(number): 4 * (64 + 64) for number in range(2)}
    assert type(model.get_submodule(name.format(0))) is nn.Linear
    told = r"methods\.second\.lora, target_modules: only linear layers.*embed_tokens"
    with pytest.raises(GuardError, match=told):
        layers(model, config(4, "embed_tokens"), WHERE)
