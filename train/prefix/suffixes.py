"""Suffixes on cached prefixes, in one pass of a model: their attention, positions and mask. Knows nothing of adapters or labels.

A prefix's keys and values are read where they lie, once for all suffixes that stand on it and for all query heads that share them,
without padding. As in cascade attention (FlashInfer; Ye et al., 2025), a token's attention to the prefix and to its own suffix are
computed apart and put together by their normalisers. No gradient flows into a prefix, and nothing that grows with its length is kept
for the backward pass but its keys and values; within a suffix attention is plain, for suffixes of some hundred tokens at most.
Products are in the base's dtype and softmax in float32, as in transformers' eager attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from guard.errors import GuardError
from train.adapter.batch import PROMPT_TENSORS, left_padded

ATTENTION = "suffixes_on_prefixes"
NOT_PLAIN = (
    "sliding_window",
    "softcap",
    "s_aux",
    "position_bias",
)  # what a model hands to attention that is more than plain
MAX_WEIGHTS = 2**25  # of attention, that there are at a time; one suffix may have more
PROBE = ((7, 11, 13, 17, 19, 23, 29, 31), (37, 41, 43))  # a prefix and a suffix
TOLERANCE = 0.05  # of the largest logit: a wrong attention differs by more, bfloat16 by less


class Prefixes:
    """The distinct prefixes of a pass, `[layers, 2, kv_heads, tokens, head_dim]` each, and which of them each suffix stands on."""

    def __init__(self, states: Sequence[Tensor], stands_on: Sequence[int]) -> None:
        device = states[0].device
        by_prefix = sorted(range(len(stands_on)), key=lambda suffix: stands_on[suffix])
        self.states = states
        self.readers = [
            stands_on.count(index) for index in range(len(states))
        ]  # suffixes on each prefix
        self.lengths = torch.tensor(
            [states[index].shape[3] for index in stands_on], device=device
        )  # tokens before each suffix
        self.order = torch.tensor(
            by_prefix, device=device
        )  # the suffixes, those on the first prefix first
        self.place = torch.argsort(self.order)  # of each suffix in that order


def attend_to_prefixes(model: PreTrainedModel, states: Callable[[Sequence[int]], Tensor]) -> None:
    """Let the model's attention read `prefixes`, where a pass has any, and try it on the `states` of a short prefix.

    Raises GuardError or ValueError if the logits after it are not those of plain attention.
    """
    whole = torch.tensor([[*PROBE[0], *PROBE[1]]], device=model.device)
    with torch.no_grad():
        model.set_attn_implementation(
            "sdpa"
        )  # what a base refuses is known of this one, not of one that is registered
        plain = model(whole, use_cache=False, logits_to_keep=1).logits[:, -1]
        model.set_attn_implementation(ATTENTION)
        try:
            found = logits(model, Prefixes([states(PROBE[0])], [0]), [PROBE[1]])
        except (RuntimeError, TypeError, AttributeError) as error:
            raise _unsuited(str(error)) from error
    if not (found - plain).abs().max() <= TOLERANCE * plain.abs().max():
        raise _unsuited(f"logits off by {float((found - plain).abs().max()):.2g}")


def logits(model: PreTrainedModel, prefixes: Prefixes, suffixes: Sequence[Sequence[int]]) -> Tensor:
    """The vocabulary's logits `[suffixes, vocabulary]` after each suffix."""
    batch = left_padded(suffixes)
    ids, own, positions = (batch[name].to(model.device) for name in PROMPT_TENSORS)
    length = ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
    seen = causal & (own[:, None] == 1) | torch.eye(
        length, dtype=torch.bool, device=ids.device
    )  # padding sees itself
    last_mlp = getattr(getattr(model.get_decoder(), "layers", [None])[-1], "mlp", None)
    with _last_position_only(last_mlp, model.get_output_embeddings()):
        after: Tensor = model(
            input_ids=ids,
            position_ids=positions + prefixes.lengths[:, None],
            attention_mask=seen[:, None],
            use_cache=False,
            logits_to_keep=1,
            prefixes=prefixes,
        ).logits[:, -1]
    return after


@contextmanager
def _last_position_only(*modules: nn.Module | None) -> Iterator[None]:
    """Let modules after the last attention compute what is asked for alone; the hidden states of other positions then mean nothing."""
    with ExitStack() as hooks:
        for module in filter(None, modules):
            handle = module.register_forward_pre_hook(
                lambda _, given: (given[0][:, -1:].contiguous(), *given[1:])
            )
            hooks.callback(handle.remove)
        yield


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    scaling: float | None = None, dropout: float = 0.0, prefixes: Prefixes | None = None, **more: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attention of `query` `[rows, heads, length, head_dim]` -> `[rows, length, heads, head_dim]`; transformers' own without `prefixes`."""
    if prefixes is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more
        )
    beyond = [name for name in NOT_PLAIN if more.get(name) is not None] + ["dropout"] * (
        dropout > 0
    )
    if beyond or attention_mask is None:
        raise _unsuited(", ".join(beyond) or "no mask")
    layer: int = module.layer_idx  # type: ignore[assignment]
    tokens = query.shape[2]
    if (
        layer == len(prefixes.states[0]) - 1
    ):  # only the last position is asked for; what the others get is not read
        query, attention_mask = query[:, :, -1:], attention_mask[:, :, -1:]
    rows, heads, length, width = query.shape
    kv_heads = key.shape[1]
    dtype = prefixes.states[0].dtype
    # The query heads that share keys are like more tokens.
    scaled = (
        (query * (width**-0.5 if scaling is None else scaling))
        .to(dtype)
        .reshape(rows, kv_heads, -1, width)
    )
    of_prefix, normaliser = _ToPrefixes.apply(scaled, prefixes, layer)
    # A prefix is then like one more key, whose score is the logarithm of its normaliser, and whose value is what was found in it.
    own = (scaled @ key.to(dtype).transpose(2, 3)).float()
    own = own.masked_fill(~attention_mask.repeat(1, 1, heads // kv_heads, 1), -torch.inf)
    shares = torch.cat((normaliser[..., None], own), dim=3).softmax(dim=3).to(dtype)
    found = shares[..., :1] * of_prefix + shares[..., 1:] @ value.to(dtype)
    return found.view(rows, heads, length, width).expand(-1, -1, tokens, -1).transpose(
        1, 2
    ).contiguous(), None


class _ToPrefixes(torch.autograd.Function):
    """Attention of scaled queries `[rows, kv_heads, tokens, head_dim]` to their rows' prefixes, and the logarithm of its normaliser.

    The gradient is that of the queries alone; the weights of attention are computed again for it (as in FlashAttention, Dao et al., 2022).
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, prefixes: Prefixes, layer: int) -> tuple[Tensor, Tensor]:
        query = query.transpose(0, 1)[:, prefixes.order]  # [kv_heads, rows, tokens, head_dim]
        found, normaliser = (
            torch.empty_like(query),
            query.new_empty(query.shape[:-1], dtype=torch.float32),
        )
        with torch.autocast(query.device.type, enabled=False):  # as in the backward pass
            for part, keys, values in _parts(prefixes, layer, query):
                weights = _products(query[:, part], keys)
                highest = weights.amax(dim=2, keepdim=True)
                total = weights.sub_(highest).exp_().sum(dim=2, keepdim=True)
                found[:, part] = (torch.bmm(weights.to(values.dtype), values) / total).view_as(
                    found[:, part]
                )
                normaliser[:, part] = (total.log_() + highest).view_as(normaliser[:, part])
        ctx.prefixes, ctx.layer = prefixes, layer
        ctx.save_for_backward(query, found, normaliser)
        return found[:, prefixes.place].transpose(0, 1), normaliser[:, prefixes.place].transpose(
            0, 1
        )

    @staticmethod
    def backward(ctx: Any, of_found: Tensor, of_normaliser: Tensor) -> tuple[Tensor, None, None]:
        query, found, normaliser = ctx.saved_tensors
        prefixes: Prefixes = ctx.prefixes
        of_found, of_normaliser = (
            each.transpose(0, 1)[:, prefixes.order] for each in (of_found, of_normaliser)
        )
        shift = of_normaliser - (of_found.float() * found.float()).sum(dim=3)
        gradient = torch.empty_like(query)
        for part, keys, values in _parts(prefixes, ctx.layer, query):
            weights = (
                _products(query[:, part], keys).sub_(_flat(normaliser[:, part, :, None])).exp_()
            )
            of_weights = (
                _products(of_found[:, part], values)
                .add_(_flat(shift[:, part, :, None]))
                .mul_(weights)
            )
            gradient[:, part] = torch.bmm(of_weights.to(keys.dtype), keys).view_as(
                gradient[:, part]
            )
        return gradient[:, prefixes.place].transpose(0, 1), None, None


def _parts(prefixes: Prefixes, layer: int, query: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Rows that stand on one prefix, by their place in the order, and its keys and values `[kv_heads, tokens, head_dim]`."""
    start = 0
    for states, readers in zip(prefixes.states, prefixes.readers, strict=True):
        keys, values = states[layer]
        together = max(1, MAX_WEIGHTS // (query.shape[0] * query.shape[2] * keys.shape[1]))
        for first in range(start, start + readers, together):
            yield slice(first, min(first + together, start + readers)), keys, values
        start += readers


def _flat(rows: Tensor) -> Tensor:
    return rows.flatten(1, 2)


def _products(query: Tensor, keys: Tensor) -> Tensor:
    """`[kv_heads, rows, tokens, head_dim]` against `[kv_heads, positions, head_dim]` -> float32 `[kv_heads, rows x tokens, positions]`."""
    return torch.bmm(_flat(query), keys.transpose(1, 2)).float()


def _unsuited(got: str) -> GuardError:
    return GuardError(
        "this base's attention cannot be given the keys and values of a prefix",
        got=got,
        remedy="Train its LoRAs alone: python -m train.run --method lora; or use a base with plain attention in transformers' interface",
    )


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
