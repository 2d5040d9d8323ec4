"""Logits and gradients of suffixes on cached prefixes are those of whole prompts.

However many suffixes share a prefix.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from transformers import (
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
)

from guard.errors import GuardError
from tests.train.conftest import BASES, SHAPE
from train.prefix.budget import Budget
from train.prefix.cache import PrefixCache
from train.prefix.suffixes import MAX_WEIGHTS, Prefixes, attend_to_prefixes, logits

PREFIXES = [40, 7, 23]
SUFFIXES = [9, 12, 4, 12, 12, 1, 5, 6, 7, 8, 2, 12]
FIRST_OF_SUFFIXES = 5000  # the token ids from here on stand in suffixes only


def tokens(length: int, seed: int, of: range) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(of, k=length))


def attend(model: PreTrainedModel) -> None:
    attend_to_prefixes(model, lambda prefix: PrefixCache(model, Budget()).read([tuple(prefix)])[0])


def prompts(
    suffixes: Sequence[int],
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], list[int]]:
    """Prefixes, suffixes of these lengths, and the prefix of each."""
    prefixes = [tokens(length, length, range(10, FIRST_OF_SUFFIXES)) for length in PREFIXES]
    found = [
        tokens(length, 100 + index, range(FIRST_OF_SUFFIXES, 10_000))
        for index, length in enumerate(suffixes)
    ]
    return (
        prefixes,
        found,
        [(index * index) % len(prefixes) for index in range(len(suffixes))],
    )  # not in their order, not in equal parts


def whole(
    model: PreTrainedModel,
    prefixes: list[tuple[int, ...]],
    suffixes: list[tuple[int, ...]],
    stands_on: list[int],
) -> torch.Tensor:
    pairs = zip(stands_on, suffixes, strict=True)
    return torch.cat(
        [
            model(torch.tensor([[*prefixes[index], *suffix]])).logits[:, -1]
            for index, suffix in pairs
        ]
    )


def of_suffixes(model: PreTrainedModel, found: torch.Tensor) -> torch.Tensor:
    """The gradient of the suffixes' own embeddings.

    It goes through every layer's attention to the prefix and to the suffix.
    """
    (gradient,) = torch.autograd.grad(
        found.float().square().mean(), model.get_input_embeddings().weight
    )  # type: ignore[call-overload]
    return gradient[FIRST_OF_SUFFIXES:].float()  # type: ignore[no-any-return]


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(
    ("lengths", "at_a_time"),
    [(SUFFIXES[:3], MAX_WEIGHTS), (SUFFIXES, MAX_WEIGHTS), (SUFFIXES, 2 * 4 * 12 * 40)],
)  # the last: two suffixes of the longest prefix
def test_logits_and_gradients_are_those_of_whole_prompts(
    monkeypatch: pytest.MonkeyPatch, base: str, lengths: list[int], at_a_time: int
) -> None:
    monkeypatch.setattr("train.prefix.suffixes.MAX_WEIGHTS", at_a_time)
    torch.manual_seed(0)
    model = BASES[base]().eval()
    prefixes, suffixes, stands_on = prompts(lengths)
    plain = whole(model, prefixes, suffixes, stands_on)
    expected = of_suffixes(model, plain)
    attend(model)
    found = logits(
        model, Prefixes(PrefixCache(model, Budget()).read(prefixes), stands_on), suffixes
    )
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4)
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(
        of_suffixes(model, found), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())
    )


def test_in_bfloat16_logits_and_gradients_are_no_further_off_than_those_of_whole_prompts() -> None:
    torch.manual_seed(0)
    model = BASES["qwen3"]().eval()
    prefixes, suffixes, stands_on = prompts(SUFFIXES)
    exact = whole(model, prefixes, suffixes, stands_on)
    exact_gradient = of_suffixes(model, exact)
    model = model.to(torch.bfloat16)
    plain = whole(model, prefixes, suffixes, stands_on)
    plain_gradient = of_suffixes(model, plain)
    attend(model)
    with torch.autocast("cpu", torch.bfloat16):
        found = logits(
            model, Prefixes(PrefixCache(model, Budget()).read(prefixes), stands_on), suffixes
        )
    gradient = of_suffixes(model, found)
    assert (found - exact).norm() < 1.25 * (plain - exact).norm()
    assert (gradient - exact_gradient).norm() < 1.25 * (plain_gradient - exact_gradient).norm()


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


def test_a_base_that_transformers_gives_no_such_attention_is_refused() -> None:
    config = GptOssConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_local_experts=2,
        layer_types=["full_attention"] * 2,
    )
    with pytest.raises(ValueError, match="attention"):
        attend(GptOssForCausalLM(config))


def test_a_base_whose_attention_does_more_with_what_it_keeps_is_refused() -> None:
    torch.manual_seed(0)
    with pytest.raises(
        GuardError, match=r"cannot be given the keys and values of a prefix \(got logits off by"
    ):
        attend(DiffLlamaForCausalLM(DiffLlamaConfig(**SHAPE)).eval())


@pytest.mark.parametrize("ignored", ["prefixes", "position_ids"])
def test_a_base_that_does_not_hand_on_what_a_pass_says_is_refused(
    monkeypatch: pytest.MonkeyPatch, ignored: str
) -> None:
    torch.manual_seed(0)
    model = BASES["llama, one KV head"]().eval()
    forward = model.forward
    monkeypatch.setattr(
        model,
        "forward",
        lambda *args, **more: forward(
            *args, **{name: more[name] for name in more if name != ignored}
        ),
    )
    with pytest.raises(GuardError, match="cannot be given the keys and values of a prefix"):
        attend(model)


def test_what_a_model_adds_to_plain_attention_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model: PreTrainedModel = BASES["qwen3"]().eval()
    monkeypatch.setattr(model.model.layers[0].self_attn, "sliding_window", 8)
    with pytest.raises(
        GuardError, match=r"cannot be given the keys and values of a prefix \(got sliding_window"
    ):
        attend(model)
