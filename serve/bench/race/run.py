"""A race to watch: one conversation against many rules, by LoRA and by aLoRA, side by side.

All methods of the recipe that are adapters run in one engine, one after the other. Each starts with
an empty prefix cache and has as many adapters as there are rules: the rule's trained ones, loaded
again under other names. The terminal and the animated `race.svg` show the times of this one run,
which are in `race.json`. Knows nothing of what the verdicts mean.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from guard.files.atomic import atomic_write
from guard.layout import Runs
from guard.prompt.decoder import PromptBuilder
from guard.recipe import Recipe, load_recipe
from serve.bench.command import add_count, add_option
from serve.bench.race.live import RaceView
from serve.bench.race.picture import RacePicture
from serve.bench.race.report import Lane, RaceReport, caption
from serve.bench.report import engine_settings, origin
from serve.bench.scores import scores_of
from serve.bench.workload.adapter_folders import MARGIN_TOKENS, adapter_folders, copies
from serve.bench.workload.prompts import conversation, wordings
from serve.engine import Call, GuardEngine, Score, ScoreRequest

TOKENS, RULES = 1000, 100
SEED = 1  # of the conversation; the warm-up has another one
WARM_UP_SEED, WARM_UP_TOKENS = 2, 100


class RaceTrack:
    """A running engine and its adapters: their `names` by method, as many as there are rules."""

    def __init__(
        self, engine: GuardEngine, prompts: PromptBuilder, names: Mapping[str, Sequence[str]]
    ) -> None:
        self._engine, self._prompts, self._names = engine, prompts, names

    def warm_up(self, tokens: int) -> None:
        """Use every adapter once, and a full step once: the first time is always slow."""
        for method, names in self._names.items():
            self._engine.score(self._requests(method, WARM_UP_TOKENS, WARM_UP_SEED, len(names)))
            self._engine.score(self._requests(method, tokens, WARM_UP_SEED, 1))

    def run(self, method: str, tokens: int, view: RaceView) -> Lane:
        """Put a conversation to all rules, from an empty cache.

        Raises GuardError if a request is refused.
        """
        names = self._names[method]
        requests = self._requests(method, tokens, SEED, len(names))
        self._engine.forget()
        verdict_s = [0.0] * len(names)
        verdicts: list[bool | None] = [None] * len(names)
        started = time.perf_counter()
        call = self._engine.submit(requests)
        while not call.done:
            self._engine.step()
            elapsed_s = time.perf_counter() - started
            self._note_verdicts(call, names, verdicts, verdict_s, elapsed_s)
            view.update(method, verdicts, elapsed_s)
        scores = scores_of(call.results(), where=method)
        violations = tuple(verdict is True for verdict in verdicts)
        view.finish(method, violations, max(verdict_s))
        computed = sum(score.computed_tokens for score in scores)
        return Lane(
            method=method,
            verdict_s=tuple(verdict_s),
            violations=violations,
            computed_tokens=computed,
        )

    def _note_verdicts(
        self,
        call: Call,
        names: Sequence[str],
        verdicts: list[bool | None],
        verdict_s: list[float],
        elapsed_s: float,
    ) -> None:
        """Note the verdicts of the last step, and the time when they came."""
        cards = self._engine.rules
        for number, outcome in enumerate(call.outcomes):
            if verdicts[number] is None and isinstance(outcome, Score):
                calibration = cards[names[number]].calibration
                verdicts[number] = calibration.verdict(names[number], outcome.logit).violates
                verdict_s[number] = elapsed_s

    def _requests(self, method: str, tokens: int, seed: int, rules: int) -> list[ScoreRequest]:
        messages = conversation(self._prompts, tokens, seed)
        names = self._names[method][:rules]
        texts = [self._engine.rules[name].rule_text for name in names]
        if all(texts):
            texts = wordings(list(dict.fromkeys(texts)), rules)
        return [ScoreRequest(messages, text, name) for text, name in zip(texts, names, strict=True)]


def run(
    recipe: Recipe,
    folders: Mapping[str, Sequence[Path]],
    *,
    tokens: int = TOKENS,
    rules: int = RULES,
    is_random: bool = False,
    console: Console | None = None,
) -> RaceReport:
    """Race all methods of `folders` (method -> adapter folders), the first one first."""
    names, adapters = copies(folders, rules)
    max_model_len = max(recipe.context_tokens, tokens + MARGIN_TOKENS)
    print(f"loading {recipe.name} with {len(adapters)} adapters", flush=True)
    with GuardEngine(
        recipe, adapters, max_loras=len(adapters), max_model_len=max_model_len
    ) as engine:
        track = RaceTrack(engine, PromptBuilder.of(recipe), names)
        track.warm_up(tokens)
        with RaceView(list(folders), rules, console) as view:
            lanes = [track.run(method, tokens, view) for method in folders]
    return RaceReport(
        **origin(recipe),
        adapters="random weights" if is_random else "trained",
        conversation_tokens=tokens,
        rules=rules,
        engine=engine_settings(recipe),
        lanes=tuple(lanes),
    )


def publish(report: RaceReport, runs: Path) -> None:
    """Write `race.json` and `race.svg`, and print the result."""
    report.save(runs / "race.json")
    with atomic_write(runs / "race.svg") as part:
        part.write_text(RacePicture(report).svg(), encoding="utf-8")
    print(report.result)
    print(caption(report))
    print(f"written: {runs / 'race.json'}, {runs / 'race.svg'}")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    text = "the rule whose trained adapters race; all for all rules"
    add_option(parser, "--rule", "medical_advice", text)
    add_count(parser, "--rules", RULES, "number of rules that the conversation is put to")
    add_count(parser, "--tokens", TOKENS, "tokens of the conversation")
    text = "adapters with random weights instead of trained ones"
    parser.add_argument("--random", action="store_true", help=text)


def main(arguments: argparse.Namespace) -> None:
    """Race, show it live, and write report and picture."""
    recipe, rule = load_recipe(arguments.model), arguments.rule
    if rule == "all":
        rule = None
    with adapter_folders(
        recipe, Runs(arguments.runs), is_random=arguments.random, rule=rule
    ) as folders:
        report = run(
            recipe,
            folders,
            tokens=arguments.tokens,
            rules=arguments.rules,
            is_random=arguments.random,
        )
    publish(report, arguments.runs)
