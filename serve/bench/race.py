"""A race to watch: one conversation against many rules, by LoRA and by aLoRA.

All methods of the recipe that are adapters run in one engine, one after the other. Each starts with
an empty prefix cache and has as many adapters as there are rules: one with random weights, loaded
again under other names. The terminal and the animated `race.svg` show the times of this one run,
which are in `race.json`. Knows nothing of what the verdicts mean.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Mapping, Sequence

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from guard.files.atomic import atomic_write
from guard.method import METHODS
from guard.prompt.decoder import PromptBuilder
from serve.bench.engines import scores_of
from serve.bench.harness import BenchCommand, add_count
from serve.bench.race_picture import Lane, RacePicture, RaceReport
from serve.bench.report import engine_settings, origin
from serve.bench.workload.adapters import MARGIN_TOKENS, random_copies
from serve.bench.workload.prompts import conversation, wordings
from serve.engine import GuardEngine, ScoreRequest

TOKENS, RULES = 1000, 100
QUICK_RULES = 10
SEED = 1  # of the conversation; the warm-up has another one
WARM_UP_SEED, WARM_UP_TOKENS = 2, 100
REFRESH_S = 0.1  # at least so long between two drawings: drawing takes time from the race


class RaceBench(BenchCommand):
    """The race."""

    name = "race"
    summary = "live: one conversation against 100 rules, LoRA beside aLoRA; draws an SVG"
    duration = "2 min"
    _engine: GuardEngine
    _names: Mapping[str, Sequence[str]]

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        add_count(parser, "--rules", RULES, "number of rules that the conversation is put to")
        add_count(parser, "--tokens", TOKENS, "tokens of the conversation")

    def main(self) -> None:
        """Race, show it live, and write report and picture."""
        report = self.race()
        report.save(self.runs.root / "race.json")
        picture = self.runs.root / "race.svg"
        with atomic_write(picture) as part:
            part.write_text(RacePicture(report).svg(), encoding="utf-8")
        print(report.result)
        print(report.caption)
        print(f"written: {self.runs.root / 'race.json'}, {picture}")

    def race(self) -> RaceReport:
        """Race all methods, the first one first."""
        rules, tokens = self.options.rules, self.options.tokens
        if self.options.quick:
            rules = min(rules, QUICK_RULES)
        self._prompts = PromptBuilder.of(self.recipe)
        arguments = {"max_model_len": max(self.recipe.context_tokens, tokens + MARGIN_TOKENS)}
        with contextlib.ExitStack() as stack:
            self._names, adapters = stack.enter_context(random_copies(self.recipe, rules))
            print(f"loading {self.recipe.name} with {len(adapters)} adapters", flush=True)
            engine = GuardEngine(self.recipe, adapters, max_loras=len(adapters), **arguments)
            self._engine = stack.enter_context(engine)
            for method in self._names:  # every adapter, and a full step: at first all is slow
                self._engine.score(self._requests(method, WARM_UP_TOKENS, WARM_UP_SEED, rules))
                self._engine.score(self._requests(method, tokens, WARM_UP_SEED, 1))
            columns = TextColumn("{task.description:<6}"), BarColumn(), MofNCompleteColumn()
            with Progress(*columns, TimeElapsedColumn(), auto_refresh=False) as progress:
                lanes = [self._run(method, tokens, rules, progress) for method in self._names]
        return RaceReport(
            **origin(self.recipe),
            conversation_tokens=tokens,
            rules=rules,
            engine=engine_settings(self.recipe),
            lanes=tuple(lanes),
        )

    def _run(self, method: str, tokens: int, rules: int, progress: Progress) -> Lane:
        """Put a conversation to all rules, from an empty cache.

        Raises GuardError if a request is refused.
        """
        requests = self._requests(method, tokens, SEED, rules)
        task = progress.add_task(METHODS[method].label, total=rules)
        self._engine.forget()
        verdict_s: dict[int, float] = {}
        shown_s = 0.0
        started = time.perf_counter()
        call = self._engine.submit(requests)
        while not call.done:
            self._engine.step()
            elapsed_s = time.perf_counter() - started
            for number, outcome in enumerate(call.outcomes):
                if outcome is not None:
                    verdict_s.setdefault(number, elapsed_s)
            is_due = elapsed_s - shown_s >= REFRESH_S or call.done
            progress.update(task, completed=len(verdict_s), refresh=is_due)
            if is_due:
                shown_s = elapsed_s
        scores = scores_of(call.results(), where=method)
        return Lane(
            method=method,
            verdict_s=tuple(verdict_s[number] for number in range(rules)),
            computed_tokens=sum(score.computed_tokens for score in scores),
        )

    def _requests(self, method: str, tokens: int, seed: int, rules: int) -> list[ScoreRequest]:
        messages = conversation(self._prompts, tokens, seed)
        names = self._names[method][:rules]
        texts = [self._engine.rules[name].rule_text for name in names]
        if all(texts):
            texts = wordings(list(dict.fromkeys(texts)), rules)
        return [ScoreRequest(messages, text, name) for text, name in zip(texts, names, strict=True)]
