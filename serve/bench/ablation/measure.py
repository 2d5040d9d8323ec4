"""Puts traffic on one engine and takes the time. Knows nothing of reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from guard.conversation.example import Message
from guard.machine.provenance import peak_memory_mib
from guard.prompt.decoder import PromptBuilder
from guard.recipe import Recipe
from guard.rule import load_rule, rule_names
from serve.bench.ablation.ablations import Ablation, Traffic
from serve.bench.ablation.engine import start_engine
from serve.bench.scores import scores_of, scores_of_calls
from serve.bench.workload.prompts import RULE_TEXT, conversation, random_rule_text, wordings
from serve.bench.workload.traffic import Done, closed_loop, zipf
from serve.engine import Call, GuardEngine, Score, ScoreRequest

WORKERS = 16  # in the fleet
# How much longer a run's conversation is than that of the run before: the lengths differ modulo a
# block.
GROWTH_TOKENS = 7
SEEDS_OF_A_ROUND = 100
LOWER_BOUND_SEED = 50  # added to the seed of the run


@dataclass(frozen=True)
class AblationSample:
    """One run.

    `latencies_ms` and `logits` (nats): one for each verdict, in the order of the requests.
    """

    wall_ms: float
    engine_ms: float
    computed_tokens: int
    lower_bound_ms: float
    adapter_loads: int
    swap_ins: int
    latencies_ms: tuple[float, ...]
    logits: tuple[float, ...]
    peak_memory_mib: float


def measure(
    recipe: Recipe, traffic: Traffic, ablation: Ablation, folders: Mapping[str, Path], number: int
) -> list[AblationSample]:
    """Measure all runs of one engine in round `number`. They need a process of their own."""
    names = list(folders)[: traffic.adapters]
    adapters = {name: folders[name] for name in names}
    with start_engine(recipe, adapters, traffic, ablation) as engine:
        driver = AblationDriver(engine, recipe, traffic, ablation, names)
        samples = []
        for run in range(traffic.warm_up_runs + traffic.runs):
            if traffic.alpha is None:
                samples.append(driver.fan_out(SEEDS_OF_A_ROUND * number + run, run))
            else:
                samples.append(driver.fleet(SEEDS_OF_A_ROUND * number + run, traffic.alpha))
    return samples[traffic.warm_up_runs :]


class AblationDriver:
    """Puts traffic on one engine."""

    def __init__(
        self,
        engine: GuardEngine,
        recipe: Recipe,
        traffic: Traffic,
        ablation: Ablation,
        adapters: Sequence[str],
    ) -> None:
        self._engine, self._recipe = engine, recipe
        self._traffic, self._ablation, self._adapters = traffic, ablation, adapters
        self._prompts = PromptBuilder.of(recipe)

    def fan_out(self, seed: int, run: int) -> AblationSample:
        """Put one conversation to all rules."""
        tokens = self._traffic.tokens + GROWTH_TOKENS * (run - self._traffic.warm_up_runs)
        messages = conversation(self._prompts, tokens, seed)
        texts = self._texts()
        requests = []
        for text, adapter in zip(texts, self._adapters, strict=True):
            requests.append(ScoreRequest(messages, text, adapter))
        calls = [requests]
        if self._ablation.one_by_one:
            calls = [[request] for request in requests]
        bare = self._bare_request(tokens + sum(map(self._suffix_tokens, texts)), seed)
        return self._sample(lambda: self._score_each(calls), lambda: self._score_each([[bare]]))

    def fleet(self, seed: int, alpha: float) -> AblationSample:
        """Put many conversations to one rule each."""
        requests = self._traffic.requests
        drawn = zipf(len(self._adapters), alpha, requests, seed)
        conversations = [
            conversation(self._prompts, self._traffic.tokens, seed * requests + number)
            for number in range(requests)
        ]
        adapters = [self._adapters[number] for number in drawn]
        return self._sample(
            lambda: self._closed_loop(conversations, adapters),
            lambda: self._closed_loop(conversations, [None] * requests),
        )

    def _texts(self) -> list[str]:
        """The texts that the adapters read: the real rules in many wordings, or nothing."""
        if self._recipe.rule_turn == "none":
            texts = [random_rule_text(self._recipe)]
        else:
            texts = [load_rule(name).text(self._recipe.rule_turn) for name in rule_names("all")]
        return wordings(texts, len(self._adapters))

    def _suffix_tokens(self, text: str) -> int:
        return len(self._prompts.suffix_ids(text))

    def _bare_request(self, needed_tokens: int, seed: int) -> ScoreRequest:
        """A prompt for the bare base with the needed tokens, or as many as the context holds."""
        tokens = min(needed_tokens, self._recipe.context_tokens - 1)
        length = tokens - self._suffix_tokens(RULE_TEXT)
        messages = conversation(self._prompts, length, seed + LOWER_BOUND_SEED)
        return ScoreRequest(messages, RULE_TEXT, None)

    def _score_each(self, calls: Sequence[Sequence[ScoreRequest]]) -> list[Score]:
        """Score calls one after the other; latencies are from the first call's submission."""
        started, scores = time.perf_counter(), list[Score]()
        for requests in calls:
            waited_ms = 1000 * (time.perf_counter() - started)
            for score in scores_of(self._engine.score(requests), self._ablation.name):
                scores.append(score._replace(latency_ms=waited_ms + score.latency_ms))
        return scores

    def _closed_loop(
        self, conversations: Sequence[tuple[Message, ...]], adapters: Sequence[str | None]
    ) -> list[Score]:
        text = random_rule_text(self._recipe)
        calls: list[Call] = []

        def submit(number: int) -> Done:
            request = ScoreRequest(conversations[number], text, adapters[number])
            call = self._engine.submit([request])
            calls.append(call)
            return lambda: call.done

        closed_loop(submit, self._engine.step, len(conversations), WORKERS)
        return scores_of_calls(calls, self._ablation.name)

    def _sample(
        self, action: Callable[[], list[Score]], lower_bound: Callable[[], list[Score]]
    ) -> AblationSample:
        engine = self._engine
        engine.forget()
        engine_ms, loads, swap_ins = engine.step_ms, engine.adapter_loads, engine.swap_ins
        started = time.perf_counter()
        scores = action()
        wall_ms = 1000 * (time.perf_counter() - started)
        engine_ms = engine.step_ms - engine_ms
        loads, swap_ins = engine.adapter_loads - loads, engine.swap_ins - swap_ins
        peak_mib = peak_memory_mib()
        engine.forget()
        lower_bound_ms = engine.step_ms
        lower_bound()
        return AblationSample(
            wall_ms=wall_ms,
            engine_ms=engine_ms,
            computed_tokens=sum(score.computed_tokens for score in scores),
            lower_bound_ms=engine.step_ms - lower_bound_ms,
            adapter_loads=loads,
            swap_ins=swap_ins,
            latencies_ms=tuple(score.latency_ms for score in scores),
            logits=tuple(score.logit for score in scores),
            peak_memory_mib=peak_mib,
        )
