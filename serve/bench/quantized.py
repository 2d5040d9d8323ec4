"""What a quantised base (as the recipe says, or int8) costs trained rules in verdicts, and saves.

Rules judge their test rows on the whole base and on this one, each conversation from an empty
cache, with thresholds chosen there by the validation rows. Weights are counted by their shapes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from guard.calibrate import calibrate
from guard.calibration_rows import for_calibration
from guard.conversation.example import Example, read_examples
from guard.files.yaml_file import validate
from guard.recipe import Recipe
from guard.weights.card import load_card, read_card
from serve.bench.engines import judged
from serve.bench.harness import Benchmark, Cell, Repeat, Sample
from serve.bench.report import Column
from serve.engine import Check, GuardEngine
from serve.engine.adapter import trained
from serve.engine.backends.arguments import sizes_of


@dataclass(frozen=True, kw_only=True)
class QuantizedCell(Cell):
    """A rule on a base."""

    rule: str
    base: str


class QuantizedBench(Benchmark[QuantizedCell]):
    """All trained rules, by the first method that shares a conversation."""

    name = "quantized"
    summary = "trained rules on the base in 8 bits: accuracy, flips, memory, time"
    duration = "2 min a rule"
    line = "base"
    repeats = 1
    columns = (
        *(Column(name, name) for name in ("rule", "base", "rows")),
        Column("accuracy", "accuracy", 3),
        Column("flips", "flips"),
        Column("weights MiB", "weights_mib"),
        Column("ms a check (min to max)", "wall_ms", 1, "spread"),
    )

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        method = [*self.recipe.sharing_methods, *self.recipe.methods][0]
        self._folders = trained(self.runs, self.recipe.name, method)
        name = self.recipe.serving_quantization or "int8"
        stated = self.recipe.model_dump() | {"serving_quantization": name}
        whole = self.recipe.model_copy(update={"serving_quantization": None})
        self._recipes = {"whole": whole, name: validate(stated, Recipe, where=self.recipe.name)}
        self._engines: dict[str, GuardEngine] = {}
        self._flagged: dict[str, list[bool]] = {}  # by rule, on the whole base

    def cells(self) -> list[QuantizedCell]:
        repeats = self.options.repeats
        pairs = itertools.product(self._folders, self._recipes)
        return [QuantizedCell(rule=rule, base=base, repeats=repeats) for rule, base in pairs]

    @contextlib.contextmanager
    def started(self, cells: Sequence[QuantizedCell]) -> Iterator[None]:
        """Start an engine on each base, with copies of the rules whose cards name it."""
        with contextlib.ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            for base, recipe in self._recipes.items():
                folders = {rule: scratch / base / rule for rule in self._folders}
                for rule, folder in folders.items():
                    shutil.copytree(self._folders[rule], folder)
                    of_base = {"base_revision": recipe.base_revision}
                    load_card(folder).model_copy(update=of_base).save(folder)
                self._engines[base] = stack.enter_context(GuardEngine(recipe, folders))
            yield

    def measure(self, cell: QuantizedCell, repeat: Repeat) -> Sample:
        """Judge a rule's test rows. Raises GuardError if one was not judged."""
        data, max_fpr = self.runs.data(cell.rule), read_card(self._folders[cell.rule]).max_fpr
        rows, test = (read_examples(data / f"{split}.jsonl") for split in ("validation", "test"))
        logits = [check.verdicts[0].logit for check in self._checks(cell, rows)]
        calibration = calibrate(*for_calibration(logits, rows, max_fpr), max_fpr)
        checks = self._checks(cell, test)
        flagged = [calibration.verdict("", check.verdicts[0].logit).violates for check in checks]
        on_whole = self._flagged.setdefault(cell.rule, flagged)  # which is measured first
        right = [verdict == row.label for verdict, row in zip(flagged, test, strict=True)]
        return {
            "rows": len(test),
            "accuracy": sum(right) / len(test),
            "flips": sum(a != b for a, b in zip(on_whole, flagged, strict=True)),
            "weights_mib": sizes_of(self._recipes[cell.base], 1, None).weights / 2**20,
            "wall_ms": [check.wall_ms for check in checks],
        }

    def _checks(self, cell: QuantizedCell, rows: Sequence[Example]) -> list[Check]:
        engine, checks = self._engines[cell.base], list[Check]()
        for row in rows:
            engine.forget()
            checks.append(judged(engine.check(row.messages, [cell.rule]), where=row.id))
        return checks
