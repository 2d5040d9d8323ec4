"""In which order conversations are computed, so that a long one keeps no other waiting."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass
class FairQueue:
    """Virtual-time fair queueing: when each of a call's requests starts, conversation by
    conversation.

    A start is a virtual time in tokens: `now` when the call came, and a quantum more for each
    quantum of the call's own tokens before it. What reads a conversation's shared tokens starts
    with the request that computes them, until its own tokens fill a quantum.
    """

    now: int
    quantum: int
    _queued_tokens: int = 0  # own tokens of the call so far
    # conversation -> its start, and the own tokens of those that read it so far
    _shared: dict[Hashable, tuple[int, int]] = field(default_factory=dict)

    def next(self, conversation: Hashable, tokens: int, shared_tokens: int) -> tuple[int, int]:
        """The next request's virtual start, and its own tokens.

        Its own are those without `shared_tokens`, if a request before it computes those of
        `conversation`.
        """
        if shared_tokens and conversation in self._shared:
            start, readers_tokens = self._shared[conversation]
            own_tokens = tokens - shared_tokens
            self._shared[conversation] = start, readers_tokens + own_tokens
            start += self._whole_quanta(readers_tokens)
        else:
            own_tokens = tokens
            start = self.now + self._whole_quanta(self._queued_tokens)
            if shared_tokens:
                self._shared[conversation] = start, tokens - shared_tokens
        self._queued_tokens += own_tokens
        return start, own_tokens

    def _whole_quanta(self, tokens: int) -> int:
        return tokens // self.quantum * self.quantum
