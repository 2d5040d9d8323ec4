"""Suffixes on cached prefixes, in one pass of a model: their attention, positions and mask.

A prefix's keys and values are read once for all suffixes that stand on it and for all query heads
that share them; `prefixes.py` says in which products. As in cascade attention (FlashInfer; Ye et
al., 2025), a token's attention to the prefix and to its own suffix are computed apart and put
together by their normalisers. No gradient flows into a prefix, and nothing that grows with its
length is kept for the backward pass but its keys and values; within a suffix attention is plain,
for suffixes of some hundred tokens at most. Products are in the base's dtype and softmax in
float32, as in transformers' eager attention. Knows nothing of adapters or labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from guard.errors import GuardError
from train.batch import LAST_POSITION, PROMPT_TENSORS, left_padded
from train.prefix.prefixes import Prefixes

ATTENTION = "suffixes_on_prefixes"
# Arguments of attention that are not plain, and not supported.
NOT_PLAIN = ("sliding_window", "softcap", "s_aux", "position_bias")
PROBE = ((7, 11, 13, 17, 19, 23, 29, 31), (37, 41, 43))  # a prefix and a suffix
TOLERANCE = 0.05  # times the largest logit: a wrong attention differs by more, bfloat16 by less


def attend_to_prefixes(model: PreTrainedModel, states: Callable[[Sequence[int]], Tensor]) -> None:
    """Let the model's attention read `prefixes`, where a pass has any. It is tried on the `states`
    of a short prefix. Raises GuardError or ValueError if the logits after it are not those of plain
    attention.
    """
    whole_prompt = torch.tensor([[*PROBE[0], *PROBE[1]]], device=model.device)
    with torch.no_grad():
        # A base may refuse this implementation; it could not know a registered one.
        model.set_attn_implementation("sdpa")
        plain = model(whole_prompt, use_cache=False, logits_to_keep=LAST_POSITION).logits[:, -1]
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
    output = _read(model, model, prefixes, suffixes, use_cache=False, logits_to_keep=LAST_POSITION)
    return cast(Tensor, output.logits[:, -1])


def states(model: PreTrainedModel, prefixes: Prefixes, suffixes: Sequence[Sequence[int]]) -> Tensor:
    """What the output layer reads `[suffixes, hidden size]` at each suffix's last token."""
    output = _read(model, model.get_decoder(), prefixes, suffixes, use_cache=False)
    return cast(Tensor, output.last_hidden_state[:, -1])


def _read(
    model: PreTrainedModel,
    called: Any,
    prefixes: Prefixes,
    suffixes: Sequence[Sequence[int]],
    **arguments: Any,
) -> Any:
    """What `called`, the model or its layers, makes of the suffixes."""
    batch = left_padded(suffixes)
    ids, is_token, positions = (batch[name].to(model.device) for name in PROMPT_TENSORS)
    length = ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
    itself = torch.eye(length, dtype=torch.bool, device=ids.device)  # so that padding sees a key
    is_visible = causal & (is_token[:, None] == 1) | itself
    last_mlp = getattr(getattr(model.get_decoder(), "layers", [None])[-1], "mlp", None)
    with _last_position_only(last_mlp, model.get_output_embeddings()):
        return called(
            input_ids=ids,
            position_ids=positions + prefixes.lengths[:, None],
            attention_mask=is_visible[:, None],
            prefixes=prefixes,
            **arguments,
        )


@contextmanager
def _last_position_only(*modules: nn.Module | None) -> Iterator[None]:
    """Let the modules after the last attention compute the last position alone. The hidden states
    of other positions are then meaningless.
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
    **arguments: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of `query` `[rows, heads, length, head_dim]` -> `[rows, length, heads, head_dim]`.
    Transformers' own without `prefixes`.
    """
    if prefixes is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **arguments
        )
    unsupported = [name for name in NOT_PLAIN if arguments.get(name) is not None]
    if dropout > 0:
        unsupported.append("dropout")
    if unsupported:
        raise _unsuited(", ".join(unsupported))
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
    # Query heads that share keys are treated as further tokens.
    scaled = (query * scaling).to(dtype).reshape(rows, key.shape[1], -1, width)
    to_prefix, normaliser = _ToPrefixes.apply(scaled, prefixes, layer)
    scores = _scores(scaled, key.to(dtype), attention_mask)
    attended = _combined(to_prefix, normaliser, scores, value.to(dtype))
    all_positions = attended.view(rows, heads, length, width).expand(-1, -1, tokens, -1)
    return all_positions.transpose(1, 2).contiguous(), None


def _scores(scaled: Tensor, key: Tensor, mask: Tensor) -> Tensor:
    """The scores of scaled queries `[rows, kv_heads, tokens, head_dim]` at their own suffix's keys.
    They are float32, -inf where the mask `[rows, 1, length, length]` hides a key.
    """
    scores = (scaled @ key.transpose(2, 3)).float()
    head_scores = scores.view(*scores.shape[:2], -1, *mask.shape[2:])
    return head_scores.masked_fill(~mask[:, :, None], -torch.inf).view(scores.shape)


def _combined(to_prefix: Tensor, normaliser: Tensor, scores: Tensor, value: Tensor) -> Tensor:
    """Attention to the prefix and to the own suffix, put together by their normalisers. A prefix is
    like one more key, whose score is the logarithm of its normaliser, and whose value is the
    attention to it.
    """
    shares = torch.cat((normaliser[..., None], scores), dim=3).softmax(dim=3).to(value.dtype)
    prefix_share, suffix_shares = torch.split(shares, [1, scores.shape[3]], dim=3)
    attended: Tensor = prefix_share * to_prefix + suffix_shares @ value
    return attended


class _ToPrefixes(torch.autograd.Function):
    """Attention of scaled queries `[rows, kv_heads, tokens, head_dim]` to their rows' prefixes, and
    the logarithm of its normaliser. Only the queries get a gradient; the weights of attention are
    computed again for it (as in FlashAttention, Dao et al., 2022).
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, prefixes: Prefixes, layer: int) -> tuple[Tensor, Tensor]:
        prefixes.arrange(query.shape[2])
        query = prefixes.ordered(query)
        attended = torch.empty_like(query)
        normaliser = query.new_empty((*query.shape[:2], 1), dtype=torch.float32)
        with torch.autocast(query.device.type, enabled=False):  # as in the backward pass
            for product, keys, values in prefixes.products(layer):
                weights = product.scores(query, keys)
                highest = weights.amax(dim=2, keepdim=True)
                total = weights.sub_(highest).exp_().sum(dim=2, keepdim=True)
                mean = torch.bmm(weights.to(values.dtype), values)
                torch.div(mean, total, out=product.of(attended))
                torch.add(total.log_(), highest, out=product.of(normaliser))
        ctx.prefixes = prefixes
        ctx.layer = layer
        ctx.save_for_backward(query, attended, normaliser)
        return prefixes.of_suffixes(attended), prefixes.of_suffixes(normaliser).squeeze(3)

    @staticmethod
    def backward(
        ctx: Any, grad_attended: Tensor, grad_normaliser: Tensor
    ) -> tuple[Tensor, None, None]:
        query, attended, normaliser = ctx.saved_tensors
        prefixes: Prefixes = ctx.prefixes
        grad_attended = prefixes.ordered(grad_attended)
        grad_normaliser = prefixes.ordered(grad_normaliser)
        shift = grad_normaliser - (grad_attended.float() * attended.float()).sum(dim=2)
        shift = shift[..., None]
        gradient = torch.empty_like(query)
        for product, keys, values in prefixes.products(ctx.layer):
            weights = product.scores(query, keys).sub_(product.of(normaliser)).exp_()
            grad_scores = torch.bmm(product.of(grad_attended), values.transpose(1, 2)).float()
            grad_scores = grad_scores.add_(product.of(shift)).mul_(weights)
            torch.bmm(grad_scores.to(keys.dtype), keys, out=product.of(gradient))
        return prefixes.of_suffixes(gradient), None, None


def _unsuited(got: str) -> GuardError:
    problem = "this base's attention cannot be given the keys and values of a prefix"
    remedy = "Train only methods that act from the whole prompt, such as a LoRA (make train "
    remedy += "RULE=... METHOD=...), or use a base with plain attention in transformers' interface"
    return GuardError(problem, got=got, remedy=remedy)


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
