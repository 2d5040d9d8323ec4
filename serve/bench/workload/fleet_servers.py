"""The servers that the fleet benchmarks compare, behind one interface. Knows nothing of clocks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from guard.conversation.example import Message
from guard.recipe import Recipe
from serve.bench.engines import memory_beside, scores_of_calls
from serve.bench.workload.traffic import FleetCounts
from serve.engine import Call, GuardEngine, ScoreRequest

if TYPE_CHECKING:
    from serve.bench.workload.peft_baseline import PeftBaseline

SLOTS = 32
CAPACITY = 25  # the PEFT baseline's adapters in memory: as many as in Pioneer's comparison
PEFT, ONE_SLOT, ALL_RESIDENT, BARE_BASE = "PEFT baseline", "1 slot", "all resident", "bare base"
SERVERS = (PEFT, ONE_SLOT, f"{CAPACITY} slots", f"{SLOTS} slots", ALL_RESIDENT, BARE_BASE)
WORKERS = 16
ENGINE: dict[str, Any] = {
    "max_num_seqs": 2 * WORKERS,
    "enable_prefix_caching": False,  # all prompts begin with the same block
}


class EngineServer:
    """The guard engine as a server of single requests. With `bare` it answers without adapters."""

    def __init__(self, engine: GuardEngine, *, bare: bool = False) -> None:
        self.engine, self._bare = engine, bare
        self.step = engine.step
        self._calls: list[Call] = []

    @property
    def counts(self) -> FleetCounts:
        counters = self.engine.counters
        return FleetCounts(counters.forward_passes, counters.adapter_loads, counters.swap_ins)

    def begin(self) -> None:
        """Forget all conversations: another server on the same engine may have had them."""
        self.engine.forget()
        self._calls = []

    def submit(self, messages: tuple[Message, ...], rule_text: str, adapter: str) -> Call:
        rule: str | None = adapter
        if self._bare:
            rule = None
        call = self.engine.submit([ScoreRequest(messages, rule_text, rule)])
        self._calls.append(call)
        return call

    def computed_tokens(self) -> int:
        """Since `begin`. Raises GuardError if a request was refused."""
        return sum(score.computed_tokens for score in scores_of_calls(self._calls, where="fleet"))


FleetServer: TypeAlias = "EngineServer | PeftBaseline"


@contextlib.contextmanager
def servers(
    recipe: Recipe, folders: Mapping[str, Path], names: Sequence[str]
) -> Iterator[dict[str, FleetServer]]:
    """The servers of SERVERS that are named, all running, each with its part of a GPU's memory."""
    from serve.bench.workload.peft_baseline import PeftBaseline

    slots = {
        ONE_SLOT: 1,
        f"{CAPACITY} slots": CAPACITY,
        f"{SLOTS} slots": SLOTS,
        ALL_RESIDENT: len(folders),
    }
    # The bare base is in one of the engines; PEFT has a base of its own.
    engine_args = ENGINE | memory_beside(len(set(names) - {BARE_BASE}))
    running: dict[str, FleetServer] = {}
    engines: list[GuardEngine] = []
    with contextlib.ExitStack() as stack:
        for name in names:
            if name in slots:
                engine = GuardEngine(recipe, folders, max_loras=slots[name], **engine_args)
                engines.append(stack.enter_context(engine))
                running[name] = EngineServer(engines[-1])
            elif name == PEFT:
                running[name] = PeftBaseline(recipe, folders, CAPACITY, WORKERS)
        if BARE_BASE in names:
            running[BARE_BASE] = EngineServer(engines[0], bare=True)
        yield running
