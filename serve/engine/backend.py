"""What the guard engine needs of the engine that computes: a protocol, and the values that cross
it.

Knows nothing of rules, conversations or cards, and of no particular engine.

A backend runs one base model: vLLM with a causal language model (`decoder.DecoderBackend`), with an
encoder (`encoder.EncoderBackend`) or with a GLiNER2 (`gliner2.Gliner2Backend`). One on another kind
of model implements the same protocol and has a row in `start.STARTS`; `GuardEngine` uses nothing
else of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from guard.weights.head import State


@dataclass(frozen=True)
class Loaded:
    """A resident adapter: the id by which the backend knows it, and the SHA-256 of its files."""

    adapter_id: int
    content: str


class BackendRequest(NamedTuple):
    """One prompt to compute: the tokens of `prefix`, then those of `suffix`.

    `prefix` is one object for all requests of a call that begin with it. `adapter` None is the bare
    base. Tokens from `activation_start` on are the adapter's (0 for a plain LoRA), those before it
    the base's. `virtual_start` is the request's virtual time, in tokens (`fair_queue.py`): lower
    ones are computed first. Requests of different `cache_salt` share no keys and values.
    `wants_state`: its output carries the base's last hidden state.
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
        """The length of the prompt in tokens."""
        return len(self.prefix) + len(self.suffix)


class SpokenSpan(NamedTuple):
    """A part of a conversation: who says it, in which turn, counted from 0, and its token ids."""

    speaker: str
    turn: int
    token_ids: tuple[int, ...]


class EngineOutput(NamedTuple):
    """What the backend computed for one request.

    `logit` is log P(yes) - log P(no) in nats at the prompt's end, of GLiNER2 that of the rule's
    label, NaN if the backend gave none.
    `state`, for a request that wants it, is what the base's output layer reads there: [hidden
    size], float32, after the final norm; of an encoder [spans, hidden size], and `spans` says what
    they are the states of.
    """

    request_id: str
    logit: float
    cached_tokens: int
    computed_tokens: int
    state: State | None = None
    spans: tuple[SpokenSpan, ...] = ()


class Backend(Protocol):
    """One base model with adapters in memory. Used by one thread; a step ends before the next
    begins.

    An implementation never answers with other weights than a request names: what it cannot compute
    is a GuardError from `load` or `submit`, a NaN logit or a missing state, or an exception from
    `step`, which then may have answered nobody.
    """

    @property
    def context_tokens(self) -> int:
        """The most tokens of a prompt and its one token of answer."""

    @property
    def slots(self) -> int:
        """How many adapters a step can use."""

    @property
    def adapted_layers(self) -> frozenset[str]:
        """The last names of the layers that an adapter may have; empty where it may have all."""

    @property
    def block_size(self) -> int:
        """Tokens of one block of the prefix cache: prompts share whole blocks."""

    @property
    def step_tokens(self) -> int:
        """The most tokens that one step computes."""

    @property
    def cache_tokens(self) -> int:
        """Tokens whose keys and values the prefix cache holds; 0 for a model that keeps none."""

    @property
    def scheduled_tokens(self) -> int:
        """Tokens computed since the start, those that were computed again included."""

    @property
    def forward_passes(self) -> int:
        """Steps since the start in which the model has computed anything."""

    @property
    def swap_ins(self) -> int:
        """How often an adapter was copied into a device slot since the start."""

    @property
    def adapter_loads(self) -> int:
        """How often an adapter was read from disk since the start."""

    @property
    def step_s(self) -> float:
        """Seconds spent in steps since the start."""

    @property
    def state_size(self) -> int:
        """The length of a state, which a head's weight must have: the base's hidden size."""

    def load(self, name: str, folder: Path) -> Loaded:
        """Make an adapter resident. Raises GuardError if it cannot; the backend is then as it was
        before.

        `name` differs between different weights: it is part of the key of what the prefix cache
        holds.
        """

    def unload(self, adapter: Loaded) -> None:
        """Free the adapter's memory. Nothing is in flight for it."""

    def in_slots(self) -> frozenset[int]:
        """The ids of the adapters that a step can use without copying them into a slot first."""

    def submit(self, request: BackendRequest) -> str:
        """Queue one prompt; the id that its EngineOutput will carry, never used again.

        What was loaded answers, whatever becomes of the adapter's files, where memory holds all
        adapters. Raises GuardError, and queues nothing, if the prompt is refused, if the files may
        have to be read again and are no longer those that were loaded (it may be a second until
        that is seen), if the adapter would not become active at `activation_start`, or if a state
        is wanted that cannot be given.
        """

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Drop requests and all that is kept for them; unknown ids are ignored."""

    def step(self) -> list[EngineOutput]:
        """Compute one batch; the outputs of the requests that it finished. If it raises, `scrub`
        must follow.
        """

    def unreadable(self) -> dict[int, Exception]:
        """The ids of adapters that had to be read again since the last call and could not, or whose
        files are other ones by now, and why.

        Their requests would wait for ever: the caller cancels them. Empty in most calls.
        """

    def forget(self) -> None:
        """Empty the prefix cache. Raises GuardError while requests are in flight."""

    def scrub(self) -> None:
        """Empty the prefix cache and overwrite what it held, so that no NaN is left. Raises as
        `forget` does.
        """

    def close(self) -> None:
        """Give the memory back. The process may then start another backend; those that run beside
        this one go on.
        """
