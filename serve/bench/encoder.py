"""How long N rules on an encoder take on one conversation.

    lora    N adapters, each of which reads the conversation
    head    N heads on the frozen encoder, which reads the conversation once

Every check is put to one of them, in turns, and nothing is cached. Trained rules are loaded again
and again under other names; every adapter has a slot. Cells are left out that would read more than
LARGEST_CELL tokens by their nominal length; what a long conversation takes is more, because an
encoder's windows overlap. Lengths are in the encoder's tokens. Knows nothing of what the verdicts
mean.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.method import METHODS
from guard.prompt.builders import prompt_builder
from serve.bench.engines import judged, with_room
from serve.bench.harness import Benchmark, Cell, Repeat, Sample
from serve.bench.report import Column
from serve.bench.workload.adapters import copies
from serve.bench.workload.prompts import conversation
from serve.engine import GuardEngine
from serve.engine.adapter import trained

# Conversations of 2,000 tokens are read in several windows.
RULES: tuple[int, ...] = (1, 2, 5, 20, 100, 500)
TOKENS: tuple[int, ...] = (120, 450, 2000)
QUICK_RULES, QUICK_TOKENS, QUICK_REPEATS = (1, 20, 100), (120, 450), 2
# Tokens of conversations that a check reads, by their nominal length: half a minute on one core
LARGEST_CELL = 50_000


@dataclass(frozen=True, kw_only=True)
class EncoderCell(Cell):
    """A method on a conversation of so many tokens."""

    tokens: int
    rules: int
    method: str

    @property
    def work(self) -> float:
        """The tokens that a check reads, without suffixes and what an encoder's windows share."""
        if METHODS[self.method].shares_conversation:
            return self.tokens
        return self.tokens * self.rules


class EncoderBench(Benchmark[EncoderCell]):
    """An encoder's rules."""

    name = "encoder"
    summary = "1 to 500 rules of an encoder on one conversation"
    duration = "6 min, --quick 1"
    repeats = 5
    columns = (
        Column("tokens", "tokens"),
        Column("rules", "rules"),
        Column("", "method"),
        Column("computed", "computed_tokens"),
        Column("passes", "forward_passes"),
        Column("swap-ins", "swap_ins", part="max"),
        Column("ms (min to max)", "wall_ms", 1, "spread"),
    )

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        if not self.recipe.is_encoder:
            remedy = "Name an encoder, as MODEL=minilm; for this one, `make serve`"
            raise GuardError("not an encoder", where=f"recipe {self.recipe.name}", remedy=remedy)
        self._folders = self._trained()
        self._prompts = prompt_builder(self.recipe)

    def _trained(self) -> dict[str, list[Path]]:
        """The folders of trained rules, by method. Raises GuardError if there is none."""
        folders: dict[str, list[Path]] = {}
        refusals: list[GuardError] = []
        for method in self.recipe.methods:
            try:
                folders[method] = list(trained(self.runs, self.recipe.name, method).values())
            except GuardError as error:
                refusals.append(error)
        if not folders:
            raise refusals[0]
        for refusal in refusals:
            print(f"left out: {refusal}", flush=True)
        return folders

    def cells(self) -> list[EncoderCell]:
        rules, tokens, repeats = RULES, TOKENS, self.options.repeats
        if self.options.quick:
            rules, tokens, repeats = QUICK_RULES, QUICK_TOKENS, min(repeats, QUICK_REPEATS)
        cells: list[EncoderCell] = []
        for length, number, method in itertools.product(tokens, rules, self._folders):
            cells.append(EncoderCell(tokens=length, rules=number, method=method, repeats=repeats))
        return [cell for cell in cells if cell.work <= LARGEST_CELL]

    @contextlib.contextmanager
    def started(self, cells: Sequence[EncoderCell]) -> Iterator[None]:
        """Start an engine for all methods, each with the rules of its largest cell."""
        loaded: dict[str, Path] = {}
        self._names: dict[str, Sequence[str]] = {}
        slots = 1
        for method, folders in self._folders.items():
            rules = max((cell.rules for cell in cells if cell.method == method), default=1)
            names, copied = copies({method: folders}, rules)
            self._names |= names
            loaded |= copied
            if method in self.recipe.adapter_methods:
                slots = rules
        print(f"loading {self.recipe.name} with {len(loaded)} rules", flush=True)
        with GuardEngine(with_room(self.recipe, slots), loaded, max_loras=slots) as self._engine:
            shortest = min(cell.tokens for cell in cells)
            for cell in cells:
                if cell.tokens == shortest:
                    self.measure(cell, Repeat(0, 1, seed=0))
            yield

    def measure(self, cell: EncoderCell, repeat: Repeat) -> Sample:
        """Measure one check. Raises GuardError if a rule was not judged."""
        messages: tuple[Message, ...] = conversation(self._prompts, cell.tokens, repeat.seed)
        engine = self._engine
        engine.forget()
        before = engine.counters
        started = time.perf_counter()
        check = engine.check(messages, self._names[cell.method][: cell.rules])
        wall_ms = (time.perf_counter() - started) * 1000
        judged(check, where=f"{cell.method} on {self.recipe.name}")
        return {
            "wall_ms": wall_ms,
            "computed_tokens": check.computed_tokens,
            "forward_passes": engine.counters.forward_passes - before.forward_passes,
            "swap_ins": engine.counters.swap_ins - before.swap_ins,
        }
