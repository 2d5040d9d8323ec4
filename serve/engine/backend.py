"""What computes, as the guard engine needs it: a protocol, and the values that cross it. Knows
nothing of rules, conversations or cards. A backend runs one base model: vLLM with a causal language
model (`decoder.py`), or an encoder (`encoder.py`). One for another kind of
model has a row in `start.STARTS`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from guard.weights.head import State
from serve.engine.score import EngineCounters


@dataclass(frozen=True)
class Loaded:
    """A resident adapter: the id by which the backend knows it, and the SHA-256 of its files."""

    adapter_id: int
    content: str


class BackendRequest(NamedTuple):
    """One prompt to compute: the tokens of `prefix`, then those of `suffix`. `prefix` is one object
    for all requests of a call that begin with it. `adapter` None is the bare base. Tokens from
    `activation_start` on are the adapter's (0 for a plain LoRA), those before it the base's.
    `virtual_start` is the request's virtual time, in tokens (`FairQueue`): lower ones are computed
    first. Requests of different `cache_salt` share no keys and values. `wants_state`: its output
    carries the base's last hidden state.
    """

    prefix: list[int]
    suffix: list[int]
    adapter: Loaded | None = None
    activation_start: int = 0
    virtual_start: int = 0
    cache_salt: str | None = None
    wants_state: bool = False

    @property
    def tokens(self) -> int:
        return len(self.prefix) + len(self.suffix)


class SpokenSpan(NamedTuple):
    """A part of a conversation: who says it, in which turn, counted from 0, and its token ids."""

    speaker: str
    turn: int
    token_ids: tuple[int, ...]


class EngineOutput(NamedTuple):
    """What the backend computed for one request. `logit` is log P(yes) - log P(no) in nats at the
    prompt's end, NaN if the backend gave none. `state`, for a
    request that wants it, is what the base's output layer reads there: [hidden size], float32,
    after the final norm; of an encoder [spans, hidden size], and `spans` says what they are the
    states of.
    """

    request_id: str
    logit: float
    cached_tokens: int
    computed_tokens: int
    state: State | None = None
    spans: tuple[SpokenSpan, ...] = ()


class Backend(Protocol):
    """One base model with adapters in memory. Used by one thread; a step ends before the next
    begins. It never answers with other weights than a request names: what it cannot compute is a
    GuardError from `load` or `submit`, a NaN logit or a missing state, or an exception from `step`,
    which then may have answered nobody.
    """

    context_tokens: int  # the most of a prompt and its one token of answer
    slots: int  # adapters that a step can use
    adapted_layers: frozenset[str]  # last names of layers that an adapter may have; empty: all
    block_size: int  # tokens of a block of the prefix cache: prompts share whole blocks
    step_tokens: int  # the most that one step computes
    cache_tokens: int  # whose keys and values the prefix cache holds; 0: it keeps none
    state_size: int  # numbers of a state, and so of a head's weight: the base's hidden size

    def counters(self) -> EngineCounters:
        """What it has done since its start; the `adapters` are the engine's to count."""

    def load(self, name: str, folder: Path) -> Loaded:
        """Make an adapter resident. Raises GuardError if it cannot, and is then as it was before.
        `name` differs between different weights: it is part of the key of cached blocks.
        """

    def unload(self, adapter: Loaded) -> None:
        """Free the adapter's memory. Nothing is in flight for it."""

    def in_slots(self) -> frozenset[int]:
        """The ids of the adapters that a step can use without copying them into a slot first."""

    def submit(self, request: BackendRequest) -> str:
        """Queue one prompt; the id that its EngineOutput will carry, never used again. Raises
        GuardError, and queues nothing, if the prompt is refused, if the adapter's files may have to
        be read again and are no longer those that were loaded (it may be a second until that is
        seen), if the adapter would not become active at `activation_start`, or if a state is wanted
        that cannot be given.
        """

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Drop requests and all that is kept for them; unknown ids are ignored."""

    def step(self) -> list[EngineOutput]:
        """Compute one batch; what it finished. If it raises, `scrub` must follow."""

    def unreadable(self) -> dict[int, Exception]:
        """The ids of adapters that could not be read again since the last call, or whose files are
        other ones by now, and why. The caller cancels their requests, which would wait for ever.
        """

    def forget(self) -> None:
        """Empty the prefix cache. Raises GuardError while requests are in flight."""

    def scrub(self) -> None:
        """As `forget`, and overwrite what the cache held, so that no NaN is left."""

    def close(self) -> None:
        """Give the memory back; backends that run beside this one go on."""
