"""Logits and gradients of suffixes on cached prefixes are those of whole prompts.

However many suffixes share a prefix, and in whatever products. Adapters of several jobs share a
layer.
"""

from __future__ import annotations

import itertools
import random
from typing import Any, cast

import pytest
import torch
import transformers
from peft import LoraConfig
from pytest import MonkeyPatch
from torch import nn

from guard.errors import GuardError
from tests.train.conftest import BASES, SHAPE
from train.prefix import prefixes
from train.prefix.cache import Budget, Prefix, PrefixCache
from train.prefix.prefixes import PADDING, Prefixes, joined_parts, separate_parts
from train.prefix.stacked import Stacked, StackedModel, layers
from train.prefix.suffixes import attend_to_prefixes, logits

PREFIXES = [40, 300, 36, 1, 7]
SUFFIXES = [9, 12, 4, 12, 12, 1, 5, 6, 7, 8, 2, 12]
FIRST_OF_SUFFIXES = 5000  # the token ids from here on stand in suffixes only


def tokens(length: int, seed: int, of: range) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(of, k=length))


def attend(model: transformers.PreTrainedModel) -> None:
    attend_to_prefixes(model, lambda prefix: PrefixCache(model, Budget()).read([tuple(prefix)])[0])


def of_suffixes(model: transformers.PreTrainedModel, found: torch.Tensor) -> torch.Tensor:
    """The gradient of the suffixes' own embeddings.

    It goes through every layer's attention to the prefix and to the suffix.
    """
    (gradient,) = torch.autograd.grad(
        found.float().square().mean(), model.get_input_embeddings().weight
    )  # type: ignore[call-overload]
    return gradient[FIRST_OF_SUFFIXES:].float()  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES)
def test_logits_and_gradients_are_those_of_whole_prompts(
    monkeypatch: MonkeyPatch, base: str
) -> None:
    """In place or in padded copies of one layer or all; with all weights at once or a few."""
    torch.manual_seed(0)
    model = BASES[base]().eval()
    read = [tokens(length, length, range(10, FIRST_OF_SUFFIXES)) for length in PREFIXES]
    suffixes: list[Prefix] = []
    stands_on: list[int] = []  # not in their order, not in equal parts
    whole: list[torch.Tensor] = []
    for index, length in enumerate(SUFFIXES):
        suffixes.append(tokens(length, 100 + index, range(FIRST_OF_SUFFIXES, 10_000)))
        stands_on.append(7 * index % len(PREFIXES))
        prompt = torch.tensor([[*read[stands_on[-1]], *suffixes[-1]]])
        whole.append(model(prompt).logits[:, -1])
    plain = torch.cat(whole)
    expected = of_suffixes(model, plain)
    largest = float(expected.abs().max())
    assert largest > 1e-4
    attend(model)
    states = PrefixCache(model, Budget()).read(read)
    two = 2 * SHAPE["num_attention_heads"] * max(SUFFIXES) * max(PREFIXES)
    for in_place, at_a_time, copied in (
        (True, 2**25, 0),
        (True, two, 0),
        (False, 2**25, 2**30),
        (False, two, 1),
    ):
        monkeypatch.setattr(prefixes, "MAX_WEIGHTS", at_a_time)
        monkeypatch.setattr(prefixes, "COPIED_BYTES", copied)
        found = logits(model, Prefixes(states, stands_on, in_place=in_place), suffixes)
        torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4)
        gradient = of_suffixes(model, found)
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-3 * largest)


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


REFUSED = "cannot be given the keys and values of a prefix"


def test_a_base_of_other_attention_is_refused() -> None:
    """Transformers gives the one no such attention, and the other does more with what it keeps."""
    small = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    config = transformers.GptOssConfig(
        **small, num_local_experts=2, layer_types=["full_attention"] * 2
    )
    with pytest.raises(ValueError, match="attention"):
        attend(transformers.GptOssForCausalLM(config))
    torch.manual_seed(0)
    with pytest.raises(GuardError, match=rf"{REFUSED} \(got logits off by"):
        attend(transformers.DiffLlamaForCausalLM(transformers.DiffLlamaConfig(**SHAPE)).eval())


@pytest.mark.parametrize("ignored", ["prefixes", "position_ids", "nothing"])
def test_a_base_that_adds_or_ignores_is_refused(monkeypatch: MonkeyPatch, ignored: str) -> None:
    torch.manual_seed(0)
    base = {"nothing": "qwen3"}.get(ignored, "llama, one KV head")
    model: transformers.PreTrainedModel = BASES[base]().eval()
    forward, told = model.forward, REFUSED
    if ignored == "nothing":
        monkeypatch.setattr(model.model.layers[0].self_attn, "sliding_window", 8)
        told = rf"{REFUSED} \(got sliding_window"

    def deaf(*args: Any, **more: Any) -> Any:
        more.pop(ignored, None)
        return forward(*args, **more)

    monkeypatch.setattr(model, "forward", deaf)
    with pytest.raises(GuardError, match=told):
        attend(model)


WEIGHTS = 8 * 4 * 24  # of a suffix at a token: KV heads, heads on each, tokens


@pytest.mark.parametrize(
    ("most_readers", "most_weights"), [(1, 2**25), (12, 2**25), (12, 2000 * WEIGHTS)]
)
def test_joined_parts_are_few_waste_little_and_hold_all_suffixes(
    monkeypatch: MonkeyPatch, most_readers: int, most_weights: int
) -> None:
    """A prefix of too many readers is read in parts."""
    monkeypatch.setattr(prefixes, "MAX_WEIGHTS", most_weights)
    rng = random.Random(0)
    lengths: list[int] = []
    suffixes_on: list[list[int]] = []
    for prefix in range(100):
        lengths.append(round(min(2000, max(40, 300 * rng.lognormvariate(0, 0.6)))))
        readers = range(rng.randint(1, most_readers))
        suffixes_on.append([100 * prefix + reader for reader in readers])
    separate = separate_parts(lengths, suffixes_on, WEIGHTS)
    joined = joined_parts(lengths, separate, WEIGHTS)
    assert len(joined) < len(separate)
    held: list[int] = []
    for part in joined:
        padded = (
            max(lengths[prefix] for prefix in part.prefixes) * len(part.prefixes) * part.readers
        )
        needed = 0
        for prefix, suffixes in zip(part.prefixes, part.suffixes, strict=True):
            assert len(suffixes) == part.readers
            needed += lengths[prefix] * len(set(suffixes))
            assert {suffix // 100 for suffix in suffixes} == {prefix}
            held += set(suffixes)
        assert padded <= PADDING * needed and padded * WEIGHTS <= most_weights
    assert sorted(held) == sorted(itertools.chain(*suffixes_on))


@pytest.mark.parametrize(
    ("device", "shortest", "in_place"),
    [("cpu", 4090, True), ("cpu", 4080, False), ("meta", 4090, False)],
)
def test_long_prefixes_are_read_in_place_on_a_cpu(
    device: str, shortest: int, in_place: bool
) -> None:
    """From half a MiB in a layer, which 4,096 of these tokens have."""
    states = [torch.empty(2, 2, 2, length, 8, device=device) for length in (shortest, 4104)]
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


def test_each_adapter_s_inputs_are_dropped_by_its_own_chance() -> None:
    """And what is left is scaled, in training alone."""
    model, name = BASES["qwen3"](), "model.layers.0.self_attn.q_proj"
    configs = [
        LoraConfig(r=64, lora_alpha=64, lora_dropout=chance, target_modules=["q_proj"])
        for chance in (0.5, 0.0)
    ]
    StackedModel(model, configs, [0, 0], ["first", "second"])
    layer = cast(Stacked, model.get_submodule(name))
    for factors in layer.factors:
        for factor in factors:
            factor.data.copy_(torch.eye(64))
    layer.acting = (0, 1)
    inputs = torch.ones(40, 5, 64)
    dropped, whole = (layer(inputs) - layer.base(inputs)).split(20)
    assert set(dropped.round(decimals=4).unique().tolist()) == {0.0, 2.0}
    assert float(dropped.mean()) == pytest.approx(1.0, abs=0.1)
    torch.testing.assert_close(whole, inputs[20:])
    with torch.no_grad():
        torch.testing.assert_close(layer(inputs) - layer.base(inputs), inputs)


def test_the_layers_of_an_adapter_are_counted_and_the_base_stays() -> None:
    """A layer that is not linear is refused."""
    model, where = BASES["qwen3"](), "recipe toy: methods.second.lora"
    counts = layers(model, LoraConfig(r=4, target_modules=["q_proj"]), where)
    name = "model.layers.{}.self_attn.q_proj"
    assert counts == {name.format(number): 4 * (64 + 64) for number in range(2)}
    assert type(model.get_submodule(name.format(0))) is nn.Linear
    told = r"methods\.second\.lora, target_modules: only linear layers.*embed_tokens"
    with pytest.raises(GuardError, match=told):
        layers(model, LoraConfig(r=4, target_modules=["embed_tokens"]), where)
