"""A reply that is checked while it is written, against the whole text checked again and again.

Adapters with random weights judge one conversation and a reply of random words that grows.
`stream`: a check every 16 tokens, as `POST /v1/check/stream` does, on the prefix cache. `naive`: a
check of the whole text every 200 characters, with nothing kept from one check to the next. Counts
are exact. Beside them stand the tokens that cannot be avoided, each new token once and every rule's
suffix at every check, and those that the naive way would compute if every rule read the text by
itself. Knows nothing of HTTP.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Literal

from guard.conversation.example import Message
from guard.files.yaml_file import Strict
from guard.prompt.decoder import PromptBuilder
from guard.recipe import Recipe, load_recipe
from serve.bench.report import BenchReport, Spread, notes, origin, percentile, publish
from serve.bench.scores import judged
from serve.bench.workload.prompts import WORDS, conversation
from serve.bench.workload.random_adapter import random_adapters
from serve.engine import GuardEngine

METHOD = "alora"
RULES = 20
CONVERSATION_TOKENS = 300  # before the reply
REPLY_TOKENS = 1000
EVERY_TOKENS = 16
EVERY_CHARACTERS = 200
REPEATS = 5

Way = Literal["stream", "naive"]


class StreamRow(Strict):
    """One way to check the reply.

    `wall_s`: the time of all checks of the reply. `check_p95_ms`: the 95th percentile of a check.
    """

    checks: int
    computed_tokens: int
    needed_tokens: int  # new tokens, and suffixes
    rule_by_rule_tokens: int  # if nothing were shared between rules or checks
    wall_s: Spread
    check_p95_ms: Spread


class StreamReport(BenchReport):
    """Everything in `runs/stream_bench.json`."""

    rules: int
    conversation_tokens: int
    reply_tokens: int
    every_tokens: int
    every_characters: int
    ways: dict[Way, StreamRow]


def run(recipe: Recipe) -> StreamReport:
    """Measure both ways on one engine. Raises GuardError if a check was not judged."""
    prompts = PromptBuilder.of(recipe)
    messages = conversation(prompts, CONVERSATION_TOKENS, seed=0)
    words = [WORDS[number * 7 % len(WORDS)] for number in range(REPLY_TOKENS)]
    replies: dict[Way, list[str]] = {
        "stream": _every_tokens(words, prompts),
        "naive": _every_characters(words),
    }
    with (
        random_adapters(recipe, [METHOD], RULES) as folders,
        GuardEngine(recipe, folders[METHOD]) as engine,
    ):
        rows: dict[Way, StreamRow] = {}
        for way, texts in replies.items():
            growing = [(*messages, Message("assistant", text)) for text in texts]
            rows[way] = _measured(engine, prompts, growing, forgets=way == "naive")
    reply = Message("assistant", " ".join(words))
    return StreamReport(
        **origin(recipe),
        rules=RULES,
        conversation_tokens=len(prompts.prefix_ids(messages)),
        reply_tokens=len(prompts.turn_ids(reply)),
        every_tokens=EVERY_TOKENS,
        every_characters=EVERY_CHARACTERS,
        ways=rows,
    )


def _every_tokens(words: Sequence[str], prompts: PromptBuilder) -> list[str]:
    """The reply each time it has grown by EVERY_TOKENS, and at its end."""
    texts: list[str] = []
    tokens = len(prompts.turn_ids(Message("assistant", "")))
    for end in range(1, len(words) + 1):
        text = " ".join(words[:end])
        grown = len(prompts.turn_ids(Message("assistant", text)))
        if grown >= tokens + EVERY_TOKENS or end == len(words):
            texts.append(text)
            tokens = grown
    return texts


def _every_characters(words: Sequence[str]) -> list[str]:
    """The reply each time it has grown by EVERY_CHARACTERS, and at its end."""
    whole = " ".join(words)
    return [whole[:end] for end in range(EVERY_CHARACTERS, len(whole), EVERY_CHARACTERS)] + [whole]


def _measured(
    engine: GuardEngine,
    prompts: PromptBuilder,
    growing: Sequence[tuple[Message, ...]],
    *,
    forgets: bool,
) -> StreamRow:
    """Check a growing reply REPEATS times, after a warm-up."""
    suffixes = sum(len(prompts.suffix_ids(card.rule_text)) for card in engine.rules.values())
    prefixes = [len(prompts.prefix_ids(messages)) for messages in growing]
    walls, slowest = [], []
    computed = 0
    for repeat in range(-1, REPEATS):
        engine.forget()
        computed, seconds = _checked(engine, growing, forgets=forgets)
        if repeat >= 0:
            walls.append(sum(seconds))
            slowest.append(1000 * percentile(seconds, 95))
    return StreamRow(
        checks=len(growing),
        computed_tokens=computed,
        needed_tokens=prefixes[-1] + len(growing) * suffixes,
        rule_by_rule_tokens=sum(RULES * prefix + suffixes for prefix in prefixes),
        wall_s=Spread.of(walls),
        check_p95_ms=Spread.of(slowest),
    )


def _checked(
    engine: GuardEngine, growing: Sequence[tuple[Message, ...]], *, forgets: bool
) -> tuple[int, list[float]]:
    """The tokens that all checks computed, and the seconds of each."""
    computed = 0
    seconds = []
    for messages in growing:
        if forgets:
            engine.forget()
        began = time.perf_counter()
        check = engine.check(messages)
        seconds.append(time.perf_counter() - began)
        computed += judged(check, where="the reply").computed_tokens
    return computed, seconds


def table(report: StreamReport) -> str:
    """The report as text."""
    lines = [
        f"{report.rules} rules on a reply of {report.reply_tokens:,} tokens behind "
        f"{report.conversation_tokens} of conversation:",
        f"  {'way':<8}{'checks':>7}{'computed':>10}{'needed':>9}{'ratio':>7}  seconds in all",
    ]
    for way, row in report.ways.items():
        ratio = row.computed_tokens / row.needed_tokens
        lines.append(
            f"  {way:<8}{row.checks:>7}{row.computed_tokens:>10,}{row.needed_tokens:>9,}"
            f"{ratio:>7.2f}  {row.wall_s.text(2)}, 95 % of checks within "
            f"{row.check_p95_ms.text()} ms"
        )
    naive = report.ways["naive"]
    lines += notes(
        f"stream: a check every {report.every_tokens} tokens. naive: the whole text every "
        f"{report.every_characters} characters, nothing kept in between; rule by rule it would "
        f"be {naive.rule_by_rule_tokens:,} tokens. needed: new tokens once, and the suffixes."
    )
    return "\n".join(lines)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options: it has none."""


def main(arguments: argparse.Namespace) -> None:
    """Measure, write the report and print the table."""
    publish(run(load_recipe(arguments.model)), arguments.runs / "stream_bench.json", table)
