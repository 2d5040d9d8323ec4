"""How long N rules on an encoder take on one conversation, and beside them N on a decoder.

    lora    N adapters, each of which reads the conversation
    head    N heads on the frozen encoder, which reads the conversation once
    alora   N adapters on the decoder of --beside, behind a conversation that is read once
    alora ..., next turn    the same where all but the last two turns, a message and its answer,
            were checked before; an encoder reads that anew

Both engines are in one process. Every check is put to one of them, in turns, and nothing else is
cached. Trained rules are loaded again and again under other names; every adapter has a slot. Cells
are left out that would read more than LARGEST_CELL tokens by their nominal length; what a long
conversation takes is more, because an encoder's windows overlap. Lengths are in the encoder's
tokens; the decoder reads the same words. Knows nothing of what the verdicts mean.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.method import METHODS
from guard.prompt.builders import prompt_builder
from guard.recipe import Recipe, load_recipe
from guard.weights.card import read_card
from serve.bench.engines import judged, memory_beside, with_room
from serve.bench.harness import Benchmark, Cell, Repeat, Sample
from serve.bench.report import Column
from serve.bench.workload.adapters import copies
from serve.bench.workload.prompts import conversation
from serve.engine import GuardEngine
from serve.engine.adapter import trained

BESIDE = "tiny"
NOBODY = "none"  # no decoder beside the encoder
# Conversations of 2,000 tokens are read in several windows.
RULES: tuple[int, ...] = (1, 2, 5, 20, 100, 500)
TOKENS: tuple[int, ...] = (120, 450, 2000)
QUICK_RULES, QUICK_TOKENS, QUICK_REPEATS = (1, 20, 100), (120, 450), 2
# Tokens of conversations that a check reads, by their nominal length: half a minute on one core
LARGEST_CELL = 50_000
NEXT_TURN = ", next turn"


@dataclass(frozen=True, kw_only=True)
class EncoderCell(Cell):
    """A method on a base, as `lora on minilm` or `alora on tiny, next turn`."""

    tokens: int
    rules: int
    line: str

    @property
    def method(self) -> str:
        return self.line.partition(" on ")[0]

    @property
    def work(self) -> float:
        """The tokens that a check reads, without suffixes and what an encoder's windows share."""
        if METHODS[self.method].shares_conversation:
            return self.tokens
        return self.tokens * self.rules


class EncoderBench(Benchmark[EncoderCell]):
    """An encoder's rules, and a decoder's beside them."""

    name = "encoder"
    summary = "1 to 500 rules of an encoder on one conversation, and of a decoder beside it"
    duration = "6 min, --quick 1"
    line = "line"
    repeats = 5
    columns = (
        Column("tokens", "tokens"),
        Column("rules", "rules"),
        Column("", "line"),
        Column("computed", "computed_tokens"),
        Column("passes", "forward_passes"),
        Column("swap-ins", "swap_ins", part="max"),
        Column("ms (min to max)", "wall_ms", 1, "spread"),
    )

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        text = f"the decoder to measure beside it, or {NOBODY} (default: {BESIDE}, if a rule is "
        parser.add_argument("--beside", help=f"{text}trained on it)")

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        if not self.recipe.is_encoder:
            remedy = "Name an encoder, as MODEL=minilm; for this one, `make serve`"
            raise GuardError("not an encoder", where=f"recipe {self.recipe.name}", remedy=remedy)
        self._recipes = [self.recipe]
        self._folders = {self.recipe.name: self._trained(self.recipe)}
        if options.beside != NOBODY:
            self._add_beside()
        self._prompts = prompt_builder(self.recipe)
        self._engines: dict[str, GuardEngine] = {}
        self._names: dict[str, Sequence[str]] = {}

    def _add_beside(self) -> None:
        """Measure a decoder too. Raises GuardError for a stated one without trained rules."""
        recipe = load_recipe(self.options.beside or BESIDE)
        try:
            self._folders[recipe.name] = self._trained(recipe)
        except GuardError as error:
            if self.options.beside is not None:
                raise
            print(f"left out: {error}", flush=True)
        else:
            self._recipes.append(recipe)

    def _trained(self, recipe: Recipe) -> dict[str, list[Path]]:
        """The folders of a base's trained rules, by method. Raises GuardError if there is none."""
        folders: dict[str, list[Path]] = {}
        refusals: list[GuardError] = []
        methods = recipe.adapter_methods  # a decoder's head would change its base's dtype
        if recipe.is_encoder:
            methods = list(recipe.methods)
        for method in methods:
            try:
                folders[method] = list(trained(self.runs, recipe.name, method).values())
            except GuardError as error:
                refusals.append(error)
        if not folders:
            raise refusals[0]
        for refusal in refusals:
            print(f"left out: {refusal}", flush=True)
        return folders

    def inputs(self) -> list[Any]:
        inputs: list[Any] = []
        for recipe in self._recipes:
            inputs += [recipe.model_dump(), recipe.base_revision]
            folders = itertools.chain(*self._folders[recipe.name].values())
            inputs += [read_card(folder).version for folder in folders]
        return inputs

    def cells(self) -> list[EncoderCell]:
        rules, tokens, repeats = RULES, TOKENS, self.options.repeats
        if self.options.quick:
            rules, tokens, repeats = QUICK_RULES, QUICK_TOKENS, min(repeats, QUICK_REPEATS)
        cells: list[EncoderCell] = []
        for length, number, line in itertools.product(tokens, rules, self._lines()):
            cells.append(EncoderCell(tokens=length, rules=number, line=line, repeats=repeats))
        return [cell for cell in cells if cell.work <= LARGEST_CELL]

    def _lines(self) -> list[str]:
        lines: list[str] = []
        for recipe in self._recipes:
            for method in self._folders[recipe.name]:
                lines.append(f"{method} on {recipe.name}")
                if METHODS[method].shares_conversation and not recipe.is_encoder:
                    lines.append(lines[-1] + NEXT_TURN)
        return lines

    @contextlib.contextmanager
    def started(self, cells: Sequence[EncoderCell]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for recipe in self._recipes:
                self._start(recipe, cells, stack)
            shortest = min(cell.tokens for cell in cells)
            for cell in cells:
                if cell.tokens == shortest:
                    self.measure(cell, Repeat(0, 1, seed=0))
            yield

    def _start(
        self, recipe: Recipe, cells: Sequence[EncoderCell], stack: contextlib.ExitStack
    ) -> None:
        """Start one engine for all methods of a recipe, each with the rules of its largest cell."""
        loaded: dict[str, Path] = {}
        slots = 0
        for method, folders in self._folders[recipe.name].items():
            line = f"{method} on {recipe.name}"
            rules = max((cell.rules for cell in cells if cell.line.startswith(line)), default=1)
            names, copied = copies({method: folders}, rules)
            self._names[line] = names[method]
            loaded |= copied
            slots += rules if method in recipe.adapter_methods else 0
        print(f"loading {recipe.name} with {len(loaded)} rules", flush=True)
        arguments = memory_beside(len(self._recipes)) | {"max_loras": max(1, slots)}
        engine = GuardEngine(with_room(recipe, slots), loaded, **arguments)
        self._engines[recipe.name] = stack.enter_context(engine)

    def measure(self, cell: EncoderCell, repeat: Repeat) -> Sample:
        """Measure one check. Raises GuardError if a rule was not judged."""
        messages: tuple[Message, ...] = conversation(self._prompts, cell.tokens, repeat.seed)
        line = cell.line.removesuffix(NEXT_TURN)
        engine = self._engines[line.partition(" on ")[2]]
        names = self._names[line][: cell.rules]
        engine.forget()
        if line != cell.line:
            judged(engine.check(messages[:-2] or messages[:1], names), where=cell.line)
        before = engine.counters
        started = time.perf_counter()
        check = engine.check(messages, names)
        wall_ms = (time.perf_counter() - started) * 1000
        judged(check, where=cell.line)
        return {
            "wall_ms": wall_ms,
            "computed_tokens": check.computed_tokens,
            "forward_passes": engine.counters.forward_passes - before.forward_passes,
            "swap_ins": engine.counters.swap_ins - before.swap_ins,
        }
