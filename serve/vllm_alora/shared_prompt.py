"""A prompt that begins with the tokens that other prompts begin with too, known by identity.

A hundred rules on a conversation of 5,000 tokens are a hundred prompts of 5,000 tokens: copying,
comparing or converting each of them takes longer than everything else that a request costs. An
engine in this process builds them as `SharedPrompt`s; elsewhere a prompt is a plain list, and
everything is as it was. Knows nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, overload

import numpy as np
import numpy.typing as npt


class Prefix:
    """The token ids that prompts have in common, and the same as an array, int32."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.array: npt.NDArray[np.int32] = np.array(token_ids, np.int32)


class SharedPrompt(Sequence[int]):
    """A prompt's token ids: those of `prefix`, then a suffix of its own. Read like a list, without
    a copy of the prefix. It grows at its end like one, as a request does by what it generates.
    """

    __slots__ = ("_length", "_suffix", "prefix")

    def __init__(self, prefix: Prefix, suffix: Sequence[int]) -> None:
        self.prefix = prefix
        self._suffix = list(suffix)
        self._length = len(prefix.token_ids) + len(self._suffix)  # asked for all the time

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return chain(self.prefix.token_ids, self._suffix)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        shared = len(self.prefix.token_ids)
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            if step != 1:
                return [*self][index]
            from_suffix = self._suffix[max(start - shared, 0) : max(stop - shared, 0)]
            if start >= shared:
                return from_suffix
            return self.prefix.token_ids[start:stop] + from_suffix
        if -self._length <= index < 0:
            index += self._length
        if 0 <= index < shared:
            return self.prefix.token_ids[index]
        if index < 0:
            raise IndexError(index)
        return self._suffix[index - shared]

    def __eq__(self, prompt: object) -> bool:
        if not isinstance(prompt, SharedPrompt | list):
            return NotImplemented
        return [*self] == [*prompt]

    __hash__ = None  # type: ignore[assignment] # it may grow

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        suffix = np.array(self._suffix, np.int32)
        return np.concatenate((self.prefix.array, suffix), dtype=dtype or np.int32)

    def copy(self) -> SharedPrompt:
        return SharedPrompt(self.prefix, self._suffix)

    def append(self, token_id: int) -> None:
        self._suffix.append(token_id)
        self._length += 1

    def extend(self, token_ids: Iterable[int]) -> None:
        before = len(self._suffix)
        self._suffix.extend(token_ids)
        self._length += len(self._suffix) - before


def prefix_of(token_ids: Sequence[int] | None) -> Prefix | None:
    if isinstance(token_ids, SharedPrompt):
        return token_ids.prefix
    return None
