"""Suffixes on cached prefixes, in one pass of a model: their attention, positions and mask.

A prefix's keys and values are read where they lie, once for all suffixes that stand on it and for
all query heads that share them, without padding. As in cascade attention (FlashInfer; Ye et al.,
2025), a token's attention to the prefix and to its own suffix are computed apart and put together
by their normalisers. No gradient flows into a prefix, and nothing that grows with its length is
kept for the backward pass but its keys and values; within a suffix attention is plain, for suffixes
of some hundred tokens at most. Products are in the base's dtype and softmax in float32, as in
transformers' eager attention. Knows nothing of adapters or labels.
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
from train.batch import PROMPT_TENSORS, left_padded

ATTENTION = "suffixes_on_prefixes"
# What a model hands to attention that is more than plain.
NOT_PLAIN = ("sliding_window", "softcap", "s_aux", "position_bias")
MAX_WEIGHTS = 2**25  # of attention, that there are at a time; one suffix may have more
PROBE = ((7, 11, 13, 17, 19, 23, 29, 31), (37, 41, 43))  # a prefix and a suffix
TOLERANCE = 0.05  # of the largest logit: a wrong attention differs by more, bfloat16 by less


class Prefixes:
    """The distinct prefixes of a pass, and which of them each suffix stands on.

    `states`: `[layers, 2, kv_heads, tokens, head_dim]` of each prefix. `readers`: suffixes on each.
    `lengths`: tokens before each suffix. `order`: the suffixes, those on the first prefix first.
    `place`: of each suffix in that order.
    """

    def __init__(self, states: Sequence[Tensor], stands_on: Sequence[int]) -> None:
        device = states[0].device
        by_prefix = sorted(range(len(stands_on)), key=lambda suffix: stands_on[suffix])
        lengths = [states[index].shape[3] for index in stands_on]
        self.states = states
        self.readers = [stands_on.count(index) for index in range(len(states))]
        self.lengths = torch.tensor(lengths, device=device)
        self.order = torch.tensor(by_prefix, device=device)
        self.place = torch.argsort(self.order)


def attend_to_prefixes(model: PreTrainedModel, states: Callable[[Sequence[int]], Tensor]) -> None:
    """Let the model's attention read `prefixes`, where a pass has any.

    It is tried on the `states` of a short prefix. Raises GuardError or ValueError if the logits
    after it are not those of plain attention.
    """
    whole = torch.tensor([[*PROBE[0], *PROBE[1]]], device=model.device)
    with torch.no_grad():
        # What a base refuses is known of this one, not of one that is registered.
        model.set_attn_implementation("sdpa")
        plain = model(whole, use_cache=False, logits_to_keep=1).logits[:, -1]
        model.set_attn_implementation(ATTENTION)
        try:
            after_prefix = logits(model, Prefixes([states(PROBE[0])], [0]), [PROBE[1]])
        except (RuntimeError, TypeError, AttributeError) as error:
            raise _unsuited(str(error)) from error
    difference = (after_prefix - plain).abs().max()
    if not difference <= TOLERANCE * plain.abs().max():  # a NaN is no agreement either
        raise _unsuited(f"logits off by {float(difference):.2g}")


def logits(model: PreTrainedModel, prefixes: Prefixes, suffixes: Sequence[Sequence[int]]) -> Tensor:
    """The vocabulary's logits `[suffixes, vocabulary]` after each suffix."""
    batch = left_padded(suffixes)
    ids, is_token, positions = (batch[name].to(model.device) for name in PROMPT_TENSORS)
    length = ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
    itself = torch.eye(length, dtype=torch.bool, device=ids.device)  # so that padding sees a key
    seen = causal & (is_token[:, None] == 1) | itself
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
    """Let modules after the last attention compute what is asked for alone.

    The hidden states of other positions then mean nothing.
    """
    with ExitStack() as hooks:
        for module in filter(None, modules):
            handle = module.register_forward_pre_hook(
                lambda _, inputs: (inputs[0][:, -1:].contiguous(), *inputs[1:])
            )
            hooks.callback(handle.remove)
        yield


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    prefixes: Prefixes | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of `query` `[rows, heads, length, head_dim]` -> `[rows, length, heads, head_dim]`.

    Transformers' own without `prefixes`.
    """
    if prefixes is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more
        )
    _check_plain(more, dropout)
    if attention_mask is None:
        raise _unsuited("no mask")
    layer: int = module.layer_idx  # type: ignore[assignment]
    tokens = query.shape[2]
    if layer == len(prefixes.states[0]) - 1:
        # Only the last position's logits are read, so the other positions' attention is not.
        query = query[:, :, -1:]
        attention_mask = attention_mask[:, :, -1:]
    rows, heads, length, width = query.shape
    dtype = prefixes.states[0].dtype
    if scaling is None:
        scaling = width**-0.5
    # The query heads that share keys are like more tokens.
    scaled = (query * scaling).to(dtype).reshape(rows, key.shape[1], -1, width)
    of_prefix, normaliser = _ToPrefixes.apply(scaled, prefixes, layer)
    scores = _scores(scaled, key.to(dtype), attention_mask)
    attended = _combined(of_prefix, normaliser, scores, value.to(dtype))
    of_tokens = attended.view(rows, heads, length, width).expand(-1, -1, tokens, -1)
    return of_tokens.transpose(1, 2).contiguous(), None


def _scores(scaled: Tensor, key: Tensor, mask: Tensor) -> Tensor:
    """Of scaled queries `[rows, kv_heads, tokens, head_dim]` at their own suffix's keys, float32.

    -inf where the mask `[rows, 1, length, length]` hides a key.
    """
    scores = (scaled @ key.transpose(2, 3)).float()
    query_heads_per_key = scaled.shape[2] // mask.shape[2]
    return scores.masked_fill(~mask.repeat(1, 1, query_heads_per_key, 1), -torch.inf)


def _combined(of_prefix: Tensor, normaliser: Tensor, scores: Tensor, value: Tensor) -> Tensor:
    """Attention to the prefix and to the own suffix, put together by their normalisers.

    A prefix is like one more key, whose score is the logarithm of its normaliser, and whose value
    is the attention to it.
    """
    shares = torch.cat((normaliser[..., None], scores), dim=3).softmax(dim=3).to(value.dtype)
    return shares[..., :1] * of_prefix + shares[..., 1:] @ value


def _check_plain(more: dict[str, Any], dropout: float) -> None:
    beyond = [name for name in NOT_PLAIN if more.get(name) is not None]
    if dropout > 0:
        beyond.append("dropout")
    if beyond:
        raise _unsuited(", ".join(beyond))


class _ToPrefixes(torch.autograd.Function):
    """Attention of scaled queries `[rows, kv_heads, tokens, head_dim]` to their rows' prefixes.

    And the logarithm of its normaliser. The gradient is that of the queries alone; the weights of
    attention are computed again for it (as in FlashAttention, Dao et al., 2022).
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, prefixes: Prefixes, layer: int) -> tuple[Tensor, Tensor]:
        query = query.transpose(0, 1)[:, prefixes.order]  # [kv_heads, rows, tokens, head_dim]
        attended = torch.empty_like(query)
        normaliser = query.new_empty(query.shape[:-1], dtype=torch.float32)
        with torch.autocast(query.device.type, enabled=False):  # as in the backward pass
            for part, keys, values in _parts(prefixes, layer, query):
                weights = _products(query[:, part], keys)
                highest = weights.amax(dim=2, keepdim=True)
                total = weights.sub_(highest).exp_().sum(dim=2, keepdim=True)
                mean = torch.bmm(weights.to(values.dtype), values) / total
                attended[:, part] = mean.view_as(attended[:, part])
                normaliser[:, part] = (total.log_() + highest).view_as(normaliser[:, part])
        ctx.prefixes = prefixes
        ctx.layer = layer
        ctx.save_for_backward(query, attended, normaliser)
        return (
            attended[:, prefixes.place].transpose(0, 1),
            normaliser[:, prefixes.place].transpose(0, 1),
        )

    @staticmethod
    def backward(ctx: Any, of_attended: Tensor, of_normaliser: Tensor) -> tuple[Tensor, None, None]:
        query, attended, normaliser = ctx.saved_tensors
        prefixes: Prefixes = ctx.prefixes
        of_attended = of_attended.transpose(0, 1)[:, prefixes.order]
        of_normaliser = of_normaliser.transpose(0, 1)[:, prefixes.order]
        shift = of_normaliser - (of_attended.float() * attended.float()).sum(dim=3)
        gradient = torch.empty_like(query)
        for part, keys, values in _parts(prefixes, ctx.layer, query):
            weights = _products(query[:, part], keys)
            weights = weights.sub_(_flat(normaliser[:, part, :, None])).exp_()
            of_weights = _products(of_attended[:, part], values)
            of_weights = of_weights.add_(_flat(shift[:, part, :, None])).mul_(weights)
            of_query = torch.bmm(of_weights.to(keys.dtype), keys)
            gradient[:, part] = of_query.view_as(gradient[:, part])
        return gradient[:, prefixes.place].transpose(0, 1), None, None


def _parts(prefixes: Prefixes, layer: int, query: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Rows that stand on one prefix, by their place in the order, with its keys and values
    `[kv_heads, tokens, head_dim]`.
    """
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
    """Scores of `query` `[kv_heads, rows, tokens, head_dim]` at `[kv_heads, positions, head_dim]`.

    Float32 `[kv_heads, rows x tokens, positions]`.
    """
    return torch.bmm(_flat(query), keys.transpose(1, 2)).float()


def _unsuited(got: str) -> GuardError:
    return GuardError(
        "this base's attention cannot be given the keys and values of a prefix",
        got=got,
        remedy="Train only methods that act from the whole prompt, such as a LoRA (make train "
        "RULE=... METHOD=...), or use a base with plain attention in transformers' interface",
    )


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
