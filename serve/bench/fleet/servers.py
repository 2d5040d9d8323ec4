"""The servers that the fleet benchmarks compare, behind one interface. Knows nothing of clocks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from guard.conversation.example import Message
from guard.recipe import Recipe
from serve.bench.fleet.report import ALL_RESIDENT, BARE_BASE, CAPACITY, ONE_SLOT, PEFT, SLOTS
from serve.bench.memory import memory_beside
from serve.bench.scores import scores_of_calls
from serve.bench.workload.traffic import Done
from serve.engine import Call, GuardEngine, ScoreRequest

if TYPE_CHECKING:
    from serve.bench.fleet.peft_baseline import PeftBaseline

WORKERS = 16
ENGINE: dict[str, Any] = {
    "max_num_seqs": 2 * WORKERS,
    "enable_prefix_caching": False,  # all prompts begin with the same block
}


class FleetServer(Protocol):
    """Answers single requests. Counters count from the start, `computed_tokens` from `begin`."""

    @property
    def adapter_loads(self) -> int:
        """Adapters read from disk."""

    @property
    def swap_ins(self) -> int:
        """Adapters copied into a slot, or given a place."""

    @property
    def forward_passes(self) -> int:
        """Batches that the model has computed."""

    @property
    def computed_tokens(self) -> int:
        """Tokens computed since `begin`. Raises GuardError if a request was refused."""

    def begin(self) -> None:
        """Forget all conversations: another server on the same engine may have had them."""

    def submit(self, messages: tuple[Message, ...], rule_text: str, adapter: str) -> Done:
        """Queue one request."""

    def step(self) -> None:
        """Answer a batch."""


class EngineServer:
    """The guard engine as a server of single requests.

    With `bare` it answers without adapters: by the base itself, or by the head `bare_rule`.
    """

    def __init__(
        self, engine: GuardEngine, *, bare: bool = False, bare_rule: str | None = None
    ) -> None:
        self.engine, self._bare, self._bare_rule = engine, bare, bare_rule
        self._calls: list[Call] = []

    def begin(self) -> None:
        """Forget all conversations."""
        self.engine.forget()
        self._calls = []

    def submit(self, messages: tuple[Message, ...], rule_text: str, adapter: str) -> Done:
        """Queue one request."""
        request = ScoreRequest(messages, rule_text, adapter)
        if self._bare:
            request = ScoreRequest(messages, rule_text, self._bare_rule)
        call = self.engine.submit([request])
        self._calls.append(call)
        return lambda: call.done

    def step(self) -> None:
        """Answer a batch."""
        self.engine.step()

    @property
    def swap_ins(self) -> int:
        """Adapters copied into a slot so far."""
        return self.engine.counters.swap_ins

    @property
    def adapter_loads(self) -> int:
        """Adapters read from disk so far."""
        return self.engine.counters.adapter_loads

    @property
    def forward_passes(self) -> int:
        """Batches that the model has computed so far."""
        return self.engine.counters.forward_passes

    @property
    def computed_tokens(self) -> int:
        """Tokens computed since `begin`. Raises GuardError if a request was refused."""
        return sum(score.computed_tokens for score in scores_of_calls(self._calls, where="fleet"))


class PeftServer:
    """The PEFT baseline as a server of single requests."""

    def __init__(self, baseline: PeftBaseline) -> None:
        self._baseline = baseline
        self.computed_tokens = 0

    def begin(self) -> None:
        """Begin a run; no conversation is kept."""
        self.computed_tokens = 0

    def submit(self, messages: tuple[Message, ...], rule_text: str, adapter: str) -> Done:
        """Queue one request."""
        request = self._baseline.submit(messages, rule_text, adapter)
        self.computed_tokens += len(request.token_ids)
        return lambda: request.done

    def step(self) -> None:
        """Answer a batch."""
        self._baseline.step()

    @property
    def swap_ins(self) -> int:
        """Adapters that were given a place so far."""
        return self._baseline.loads

    @property
    def adapter_loads(self) -> int:
        """Adapters read from disk so far: each that was given a place."""
        return self._baseline.loads

    @property
    def forward_passes(self) -> int:
        """Batches that the model has computed so far."""
        return self._baseline.forward_passes


@contextlib.contextmanager
def servers(
    recipe: Recipe,
    folders: Mapping[str, Path],
    names: Sequence[str],
    heads: Mapping[str, Path] | None = None,
) -> Iterator[dict[str, FleetServer]]:
    """The servers of `SERVERS` that are named, all running, each with its part of a GPU's memory.

    `heads`: the head by which the bare base answers, where it has no verdict of its own.
    """
    from serve.bench.fleet.peft_baseline import BASELINES

    heads = heads or {}
    served = {**folders, **heads}
    slots = {
        ONE_SLOT: 1,
        f"{CAPACITY} slots": CAPACITY,
        f"{SLOTS} slots": SLOTS,
        ALL_RESIDENT: len(folders),
    }
    # The bare base is in one of the engines; PEFT has a base of its own.
    engine_args = ENGINE | memory_beside(len(set(names) - {BARE_BASE}))
    with contextlib.ExitStack() as stack:
        engines: dict[str, EngineServer] = {}
        running: dict[str, FleetServer] = {}
        for name in names:
            if name in slots:
                engine = GuardEngine(recipe, served, max_loras=slots[name], **engine_args)
                engines[name] = EngineServer(stack.enter_context(engine))
            elif name == PEFT:
                baseline = BASELINES[recipe.kind](recipe, folders, batch=WORKERS)
                running[name] = PeftServer(baseline)
        if BARE_BASE in names:
            first = next(iter(engines.values())).engine
            bare_rule = next(iter(heads), None)
            running[BARE_BASE] = EngineServer(first, bare=True, bare_rule=bare_rule)
        running |= engines
        yield {name: running[name] for name in names}
