"""The prefixes of a pass, and the batched products in which suffixes attend to them.

In place, a prefix's keys and values are read where they lie, one product after another: the fastest
on a CPU for long ones. A GPU would mostly wait for their launches, and a CPU for the calls of short
ones, so there prefixes of like length and like many readers go into one product: their keys and
values are copied side by side, the shorter ones filled up with zeros that are hidden. Either way
suffixes share what they read, and the mathematics is the same. Knows nothing of models, adapters or
gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_WEIGHTS = 2**25  # weights of attention at a time; one suffix may have more
PADDING = 1.25  # the most weights of a padded product, relative to those without padding
PADDED_BYTES = 2**19  # a layer's keys and values of a prefix: copying fewer is cheaper than a call
COPIED_BYTES = 2**30  # padded keys and values at a time; one layer's may be more


@dataclass(frozen=True)
class Part:
    """Suffixes that attend to their prefixes in one product. `suffixes` are the suffixes on each of
    `prefixes`, equally many; where a prefix has fewer, the last is repeated.
    """

    prefixes: list[int]
    suffixes: list[list[int]]

    @property
    def readers(self) -> int:
        return len(self.suffixes[0])


def separate_parts(
    lengths: Sequence[int], suffixes_on: Sequence[list[int]], weights_per_token: int
) -> list[Part]:
    """The suffixes on each prefix, as many at once as MAX_WEIGHTS allows. `lengths`: tokens of each
    prefix. `weights_per_token`: those of one suffix at one token.
    """
    parts: list[Part] = []
    for prefix, suffixes in enumerate(suffixes_on):
        together = max(1, MAX_WEIGHTS // (weights_per_token * lengths[prefix]))
        for first in range(0, len(suffixes), together):
            parts.append(Part([prefix], [suffixes[first : first + together]]))
    return parts


def joined_parts(
    lengths: Sequence[int], parts: Sequence[Part], weights_per_token: int
) -> list[Part]:
    """`parts` of one prefix each in as few as PADDING and MAX_WEIGHTS allow, longest first."""
    joined: list[Part] = []
    group: list[Part] = []
    for part in sorted(parts, key=lambda part: (-part.readers, -lengths[part.prefixes[0]])):
        if group and not _fit(lengths, [*group, part], weights_per_token):
            joined.append(_joined(group))
            group = []
        group.append(part)
    joined.append(_joined(group))
    return joined


def _fit(lengths: Sequence[int], group: Sequence[Part], weights_per_token: int) -> bool:
    longest = max(lengths[part.prefixes[0]] for part in group)
    padded = len(group) * longest * group[0].readers
    needed = sum(lengths[part.prefixes[0]] * part.readers for part in group)
    return padded <= PADDING * needed and padded * weights_per_token <= MAX_WEIGHTS


def _joined(group: Sequence[Part]) -> Part:
    """The parts of `group` as one; the first has the most readers."""
    suffixes: list[list[int]] = []
    for part in group:
        (part_suffixes,) = part.suffixes
        missing = group[0].readers - len(part_suffixes)
        suffixes.append(part_suffixes + part_suffixes[-1:] * missing)
    return Part([part.prefixes[0] for part in group], suffixes)


@dataclass(frozen=True)
class Product:
    """A batched product: a matrix for each KV head and prefix, in this order. `rows` is its part of
    a pass's order. `hidden`, bool `[prefixes, 1, tokens]`, says which tokens are padding; None if
    none is.
    """

    rows: slice
    matrices: int
    hidden: Tensor | None

    def of(self, ordered: Tensor) -> Tensor:
        """The product's share of `[KV heads x suffixes, tokens, width]`, as `[matrices, readers x
        tokens, width]`.
        """
        return ordered[self.rows].view(self.matrices, -1, ordered.shape[2])

    def scores(self, query: Tensor, keys: Tensor) -> Tensor:
        """The scores, float32 `[matrices, readers x tokens, positions]`, -inf at padding. `query`
        is in a pass's order; `keys` `[matrices, positions, head_dim]`.
        """
        scores = torch.bmm(self.of(query), keys.transpose(1, 2))
        if self.hidden is not None:
            by_prefix = scores.view(-1, len(self.hidden), *scores.shape[1:])
            by_prefix.masked_fill_(self.hidden, -torch.inf)
        return scores.float()


class Prefixes:
    """The distinct prefixes of a pass, and which of them each suffix stands on. `states`: `[layers,
    2, kv_heads, tokens, head_dim]` of each prefix. `lengths`: tokens before each suffix.
    `in_place`: read where they lie or padded; by default in place on a CPU, where they are long.
    """

    def __init__(
        self, states: Sequence[Tensor], stands_on: Sequence[int], *, in_place: bool | None = None
    ) -> None:
        device = states[0].device
        self.states = states
        self.layers, _, self._kv_heads, _, self._width = states[0].shape
        if in_place is None:
            layer_bytes = sum(state.nbytes for state in states) / len(states) / self.layers
            in_place = device.type == "cpu" and layer_bytes > PADDED_BYTES
        self.in_place = in_place
        self._tokens = [prefix_states.shape[3] for prefix_states in states]
        self._suffixes_on: list[list[int]] = [[] for _ in states]
        for suffix, prefix in enumerate(stands_on):
            self._suffixes_on[prefix].append(suffix)
        self.lengths = torch.tensor([self._tokens[index] for index in stands_on], device=device)
        self._parts: list[Part] = []
        self._copied = range(0)  # the layers whose keys and values lie padded in `_copies`
        self._copies: list[Tensor] = []

    def arrange(self, tokens: int) -> None:
        """Decide on the products of the pass, for suffixes of so many queries to a KV head. The
        first call counts: later layers compute as many, or fewer.
        """
        if self._parts:
            return
        weights_per_token = self._kv_heads * tokens
        self._parts = separate_parts(self._tokens, self._suffixes_on, weights_per_token)
        if not self.in_place:
            self._parts = joined_parts(self._tokens, self._parts, weights_per_token)
        order: list[int] = []
        self._products: list[Product] = []
        for part in self._parts:
            start = len(order)
            for head in range(self._kv_heads):
                for suffixes in part.suffixes:
                    order += [suffix * self._kv_heads + head for suffix in suffixes]
            matrices = self._kv_heads * len(part.prefixes)
            rows = slice(start, len(order))
            self._products.append(Product(rows, matrices, self._hidden(part)))
        position = {row: index for index, row in enumerate(order)}
        device = self.lengths.device
        self._order = torch.tensor(order, device=device)
        self._position = torch.tensor([position[row] for row in range(len(position))]).to(device)

    def ordered(self, values: Tensor) -> Tensor:
        """`[suffixes, kv_heads, ...]` in the order of the products, `[rows of products, ...]`."""
        return values.flatten(0, 1)[self._order]

    def of_suffixes(self, ordered: Tensor) -> Tensor:
        """`[rows of products, ...]` back as `[suffixes, kv_heads, ...]`."""
        return ordered[self._position].view(-1, self._kv_heads, *ordered.shape[1:])

    def products(self, layer: int) -> Iterator[tuple[Product, Tensor, Tensor]]:
        """The products of a pass, with keys and values `[matrices, positions, head_dim]` each."""
        if not self.in_place:
            self._copy(layer)
        for index, product in enumerate(self._products):
            if self.in_place:
                keys, values = self.states[self._parts[index].prefixes[0]][layer]
            else:
                keys, values = self._copies[index][layer - self._copied.start]
            yield product, keys, values

    def _hidden(self, part: Part) -> Tensor | None:
        tokens = [self._tokens[prefix] for prefix in part.prefixes]
        if len(set(tokens)) == 1:
            return None
        hidden = torch.arange(max(tokens)) >= torch.tensor(tokens)[:, None]
        return hidden[:, None].to(self.lengths.device)

    def _copy(self, layer: int) -> None:
        """Make the padded copies of this layer, and of as many beside it as there is room for. The
        backward pass, which reads the layers in the other order, begins with what the forward pass
        has copied last.
        """
        if layer in self._copied:
            return
        self._copies = []  # freed before others are made
        positions = 0
        for part in self._parts:
            positions += len(part.prefixes) * max(self._tokens[index] for index in part.prefixes)
        values = 2 * self._kv_heads * positions * self._width
        together = max(1, COPIED_BYTES // (values * self.states[0].element_size()))
        start = layer // together * together
        self._copied = range(start, min(start + together, self.layers))
        self._copies = [self._padded(part, self._copied) for part in self._parts]

    def _padded(self, part: Part, layers: range) -> Tensor:
        """Keys and values of a part, in one copy: `[layers, 2, matrices, positions, head_dim]`."""
        longest = max(self._tokens[prefix] for prefix in part.prefixes)
        shortest = min(self._tokens[prefix] for prefix in part.prefixes)
        rows = len(layers) * 2 * self._kv_heads
        zeros = self.states[0].new_zeros(rows * (longest - shortest) * self._width)
        pieces: list[Tensor] = []
        for prefix in part.prefixes:
            pieces.append(self.states[prefix][layers.start : layers.stop].flatten(0, 2))
            missing = longest - self._tokens[prefix]
            if missing:
                filler = zeros[: rows * missing * self._width]
                pieces.append(filler.view(rows, missing, self._width))
        return torch.cat(pieces, dim=1).view(len(layers), 2, -1, longest, self._width)
