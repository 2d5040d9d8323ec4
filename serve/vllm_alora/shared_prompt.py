"""A prompt that begins with the tokens that other prompts begin with too, known by identity.

A hundred rules on a conversation of 5,000 tokens are a hundred prompts of 5,000 tokens: comparing
or converting each of them takes longer than everything else that a request costs. An engine in
this process builds them as `SharedPrompt`s; elsewhere a prompt is a plain list, and everything is
as it was. Knows nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class Prefix:
    """The token ids that prompts have in common, and the same as an array, int32."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.array: npt.NDArray[np.int32] = np.array(token_ids, np.int32)


class SharedPrompt(list[int]):
    """A prompt's token ids: those of `prefix`, then a suffix of its own. Not to be changed."""

    def __init__(self, prefix: Prefix, suffix: Sequence[int]) -> None:
        super().__init__(prefix.token_ids)
        self.extend(suffix)
        self.prefix = prefix

    def array(self) -> npt.NDArray[np.int32]:
        """All token ids, int32."""
        shared = len(self.prefix.array)
        ids = np.empty(len(self), np.int32)
        ids[:shared] = self.prefix.array
        ids[shared:] = self[shared:]
        return ids


def prefix_of(token_ids: Sequence[int] | None) -> Prefix | None:
    """The prefix of a prompt that says what it shares, None of any other."""
    if isinstance(token_ids, SharedPrompt):
        return token_ids.prefix
    return None
