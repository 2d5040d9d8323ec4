"""How long N rules take on one conversation.

Modes in one engine, in turns, on the same conversations:

    base          the bare base model, N prompts with the rules' titles, which it has to read: the
                  cost without adapters
    lora          N standard LoRAs: each must prefill the conversation for itself
    alora         N aLoRAs: the conversation is prefilled once
    lower bound   the bare base prefilling one prompt of as many tokens as the conversation and all
                  suffixes have; beyond the context, of as many as it holds, scaled by tokens

Every repeat has a fresh conversation, and every measurement starts with an empty prefix cache. As
many adapters as rules are resident: one with random weights, loaded again under other names. An
encoder is measured by the benchmark `encoder` instead. Knows nothing of what the verdicts mean.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.method import METHODS
from guard.prompt.decoder import PromptBuilder
from serve.bench.encoder import EncoderBench
from serve.bench.engines import scores_of, with_room
from serve.bench.harness import Benchmark, Cell, Ratio, Repeat, Sample, number
from serve.bench.report import Column, GridReport
from serve.bench.workload.adapters import copies, random_adapters
from serve.bench.workload.prompts import RULE_TEXT, conversation, wordings
from serve.engine import GuardEngine, Score, ScoreRequest

BASE, LOWER_BOUND = "base", "lower bound"
RULES_OF_LENGTH_SWEEP = 5
LENGTHS_OF_RULES_SWEEP = (100, 1000, 5000)
LENGTHS = (100, 250, 500, 1000, 2000, 5000)
RULES = (1, 5, 10, 20, 50, 100)
# With a hundred rules LoRA takes a hundred times as long as the rest.
LORA_REPEATS = 5
QUICK_POINTS = ((100, 5), (1000, 1), (1000, 5), (5000, 5), (1000, 20), (1000, 100))
QUICK_REPEATS = 2
SUFFIX_TOKENS = 50  # about how many a rule's suffix has
SHORTEST = 60  # tokens of a conversation
MARGIN_TOKENS = 200  # for a rule's suffix, and because a repeat's conversation may be longer
OTHER_WORDS = 1 << 40  # added to a seed, gives the lower bound's conversation other words


def shares_conversation(mode: str) -> bool:
    """Whether a mode prefills a conversation once, however many rules there are."""
    return mode in (BASE, LOWER_BOUND) or METHODS[mode].shares_conversation


@dataclass(frozen=True, kw_only=True)
class LatencyCell(Cell):
    """A mode on conversations of about `tokens` tokens before the rule turn."""

    tokens: int
    rules: int
    mode: str

    @property
    def work(self) -> float:
        """The approximate number of tokens that a repeat computes."""
        suffixes = SUFFIX_TOKENS * self.rules
        if shares_conversation(self.mode):
            return self.tokens + suffixes
        return self.rules * self.tokens + suffixes


def spread_length(tokens: int, repeat: Repeat, block: int) -> int:
    """The tokens of a repeat's conversation: at most half a block more or less than `tokens`. What
    is beyond whole blocks is spread evenly over the repeats. The base computes that again for every
    rule, so a single length would favour it or put it at a disadvantage.
    """
    remainder = int((repeat.number + 0.5) / repeat.of * block)
    shortest = tokens - block // 2
    return shortest + (remainder - shortest) % block


class LatencyBench(Benchmark[LatencyCell]):
    """The latency benchmark of a decoder."""

    name = "latency"
    summary = "1 to 100 rules on one conversation: LoRA, aLoRA, the bare base, and the lower bound"
    duration = "30 min, --quick 2"
    line = "mode"
    report_name = "latency"
    repeats = 20
    columns = (
        Column("tokens", "tokens"),
        Column("rules", "rules"),
        Column("", "mode"),
        Column("wall ms (min to max)", "wall_ms", part="spread"),
        Column("p95", "wall_ms", part="p95"),
        Column("a request ms", "request_ms"),
        Column("p99", "request_ms", part="p99"),
        Column("cached", "cached_tokens"),
        Column("computed", "computed_tokens"),
        Column("/aLoRA", "over_alora", 1, unit="x"),
        Column("/lower bound", "over_lower_bound", 2, unit="x"),
        Column("engine/lower bound (min to max)", "engine_over_lower_bound", 2, "spread", "x"),
    )
    ratios = (
        Ratio("over_alora", "wall_ms", "alora"),
        Ratio("over_lower_bound", "wall_ms", LOWER_BOUND),
        Ratio("engine_over_lower_bound", "engine_ms", LOWER_BOUND),
    )

    def main(self) -> None:
        """Measure a decoder, or an encoder by its own benchmark."""
        if not self.recipe.is_encoder:
            super().main()
            return
        self.options.repeats = min(self.options.repeats, EncoderBench.repeats)
        EncoderBench(self.options).main()

    def cells(self) -> list[LatencyCell]:
        repeats: int = self.options.repeats
        points = dict.fromkeys([(length, RULES_OF_LENGTH_SWEEP) for length in LENGTHS], repeats)
        for length in LENGTHS_OF_RULES_SWEEP:
            points |= dict.fromkeys([(length, rules) for rules in RULES], repeats)
        if self.options.quick:
            points = dict.fromkeys(QUICK_POINTS, min(repeats, QUICK_REPEATS))
        longest = self.recipe.context_tokens - MARGIN_TOKENS
        cells: list[LatencyCell] = []
        for tokens, rules in sorted(points, key=lambda point: point[1] * (point[0] + 50)):
            if tokens > longest:
                continue
            for mode in (BASE, *self.recipe.adapter_methods, LOWER_BOUND):
                times = points[tokens, rules]
                if not shares_conversation(mode):
                    times = min(times, LORA_REPEATS)
                cells.append(LatencyCell(tokens=tokens, rules=rules, mode=mode, repeats=times))
        return cells

    @contextlib.contextmanager
    def started(self, cells: Sequence[LatencyCell]) -> Iterator[None]:
        """Run an engine with a slot for every adapter: none is loaded while the clock runs."""
        with contextlib.ExitStack() as stack:
            methods = self.recipe.adapter_methods
            of_method = stack.enter_context(random_adapters(self.recipe, methods, 1))
            folders = {method: [of_method[f"{method}-0"]] for method in methods}
            names, adapters = copies(folders, max(cell.rules for cell in cells))
            slots = max(len(adapters), self.recipe.engine.get("max_loras", 0))
            print(f"loading {self.recipe.name} with {len(adapters)} adapters", flush=True)
            recipe = with_room(self.recipe, slots)
            engine = GuardEngine(recipe, adapters, max_loras=slots)
            self.use(stack.enter_context(engine), names)
            # The first time is always slow: every adapter once, and the longest step once.
            for tokens, rules in ((100, len(self.texts)), (1000, 1)):
                for mode in (BASE, *names, LOWER_BOUND):
                    cell = LatencyCell(tokens=tokens, rules=rules, mode=mode)
                    self.measure(cell, Repeat(0, 1, seed=tokens))
            yield

    def use(self, engine: GuardEngine, names: Mapping[str, Sequence[str]]) -> None:
        """Measure on this engine. `names`: the adapters by method, as many as a cell has rules."""
        self._engine, self._names = engine, names
        self._prompts = PromptBuilder.of(self.recipe)
        some = list(names.values())[-1]
        rule_texts = list(dict.fromkeys(engine.rules[name].rule_text for name in some))
        # An adapter may read nothing of its rule; the base has to be told.
        self.titles = wordings([text for text in rule_texts if text] or [RULE_TEXT], len(some))
        self.texts = [""] * len(some)
        if all(rule_texts):
            self.texts = self.titles

    def measure(self, cell: LatencyCell, repeat: Repeat) -> Sample:
        """Measure all verdicts of one conversation, from an empty cache. Raises GuardError for a
        refusal, or if the cache was not empty.
        """
        length = spread_length(cell.tokens, repeat, self._engine.backend.block_size)
        messages = conversation(self._prompts, length, repeat.seed)
        if cell.mode == LOWER_BOUND:
            suffixes = sum(map(self._suffix_tokens, self.texts[: cell.rules]))
            needed = len(self._prompts.prefix_ids(messages)) + suffixes
            return self._lower_bound(needed, repeat.seed)
        rules: list[tuple[str, str | None]] = [(text, None) for text in self.titles]
        if cell.mode != BASE:
            rules = list(zip(self.texts, self._names[cell.mode], strict=True))
        return self._asked(rules[: cell.rules], messages, cell.mode)

    def _suffix_tokens(self, text: str) -> int:
        return len(self._prompts.suffix_ids(text))

    def _lower_bound(self, needed_tokens: int, seed: int) -> Sample:
        """One base prompt of about the needed tokens; its times are scaled to them."""
        title, tokens = self.titles[0], min(needed_tokens, self.recipe.context_tokens - 1)
        length = max(tokens - self._suffix_tokens(title), SHORTEST)
        messages = conversation(self._prompts, length - 1, seed + OTHER_WORDS)
        sample = dict(self._asked([(title, None)], messages, BASE))
        scale = needed_tokens / number(sample, "computed_tokens")
        for quantity in ("wall_ms", "engine_ms"):
            sample[quantity] = scale * number(sample, quantity)
        return sample | {"needed_tokens": needed_tokens}

    def _asked(
        self, rules: Sequence[tuple[str, str | None]], messages: tuple[Message, ...], mode: str
    ) -> Sample:
        """Ask all rules, each a text and its adapter."""
        engine = self._engine
        requests = [ScoreRequest(messages, text, adapter) for text, adapter in rules]
        engine.forget()
        before, started = engine.counters, time.perf_counter()
        outcomes = engine.score(requests)
        wall_ms = 1000 * (time.perf_counter() - started)
        after = engine.counters
        scores = scores_of(outcomes, where=f"mode {mode}")
        check_cache_was_empty(scores, mode)
        return {
            "wall_ms": wall_ms,
            "engine_ms": 1000 * (after.step_s - before.step_s),
            "request_ms": [score.latency_ms for score in scores],
            "cached_tokens": sum(score.cached_tokens for score in scores),
            "computed_tokens": sum(score.computed_tokens for score in scores),
            "swap_ins": after.swap_ins - before.swap_ins,
        }

    def notes(self, report: GridReport) -> list[str]:
        swap_ins = max(row.measured["swap_ins"].max for row in report.rows)
        return [
            "wall: all verdicts of one conversation. a request: the single requests, from",
            "submission. What the conversation has beyond whole blocks of the prefix cache (the",
            "repeats spread it evenly) aLoRA computes once, the base for every rule.",
            f"Swap-ins while the clock ran: {swap_ins:.0f}. The adapters have random weights.",
        ]


def check_cache_was_empty(scores: Sequence[Score], mode: str) -> None:
    """Raise GuardError if anything came from an earlier measurement. The first request must find an
    empty cache, and a LoRA shares with nobody.
    """
    cached = sum(score.cached_tokens for score in scores)
    if scores[0].cached_tokens or (cached and not shares_conversation(mode)):
        problem = "the prefix cache leaked between measurements"
        remedy = "Run `make doctor` and the tests of serve/"
        where, got = f"mode {mode}", f"{cached} cached tokens"
        raise GuardError(problem, where=where, got=got, remedy=remedy)
