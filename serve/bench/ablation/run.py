"""`make bench-ablation`: what each of the engine's ideas brings, measured by switching it off. Knows nothing of what the verdicts mean.

Three kinds of traffic, each put to engines that lack one thing each:

    fan-out   one conversation with many rules, and a slot for every adapter
    waves     the same with a slot for every third adapter
    fleet     conversations with one rule each, by Zipf's law of many, with few slots and little host memory

Every engine is a process of its own; the engines take turns, with the same conversations and adapters, and must give the same verdicts.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from guard.errors import GuardError, exits_cleanly
from guard.layout import Runs, fingerprint
from guard.prompt import PromptBuilder
from guard.provenance import gpus, peak_memory_mib, provenance
from guard.recipe import Recipe, load_recipe
from guard.rule import RuleTurn, load_rule, rule_names
from serve.bench.ablation.report import AblationReport, AblationRow, TrafficRows, draw, table
from serve.bench.report import publish
from serve.bench.traffic import Done, closed_loop, zipf
from serve.bench.workload import RULE_TEXT, conversation, told, wordings
from serve.engine.score import Score, ScoreRequest

if TYPE_CHECKING:
    from serve.engine import Call, GuardEngine

WORKERS = 16  # of the fleet
ROUNDS = 3
SAME_NATS = {
    "float32": 1e-2
}  # by how much the whole engine's verdict may differ; in a narrower type by half a nat


@dataclass(frozen=True)
class Traffic:
    """What is asked of an engine with `slots` slots, and what a run is.

    Without `alpha`: one conversation of `tokens` tokens with all `adapters`; its limit is one prompt of the base with as many tokens as are
    needed. With it: `requests` such conversations, each with one adapter by Zipf's law; the limit is that the base answers them.
    """

    name: str
    tokens: int
    adapters: int
    slots: int
    runs: int = 5  # of an engine in a round
    alpha: float | None = None
    requests: int = 0
    in_host_memory: int | None = None  # adapters; None: all

    def __str__(self) -> str:
        slots = f"{self.slots} slots" + (
            f", {self.in_host_memory} in host memory" if self.in_host_memory else ""
        )
        if self.alpha is None:
            return f"a conversation of {self.tokens:,} tokens with {self.adapters} rules, {slots}"
        asked = f"{self.requests} conversations of {self.tokens:,} tokens with one of {self.adapters} rules each"
        return f"{asked}, Zipf's alpha {self.alpha}, {slots}"


FAN_OUT = Traffic("fan-out", tokens=1000, adapters=100, slots=100)
WAVES = Traffic("waves", tokens=1000, adapters=100, slots=32)
FLEET = Traffic(
    "fleet", tokens=200, adapters=256, slots=32, runs=3, alpha=1.0, requests=256, in_host_memory=64
)


@dataclass(frozen=True)
class Variant:
    """An engine that lacks something: seams of the plugin by the ends of their targets, engine arguments, what adapters are told and have.

    `on_cpu`: what is switched off is there on a CPU only.
    """

    name: str
    without: tuple[str, ...] = ()
    engine: Mapping[str, Any] = field(default_factory=dict)
    rule_turn: RuleTurn | None = None
    all_linear: bool = False  # the adapters have weights in every linear layer
    one_by_one: bool = False
    as_asked: bool = False  # the rules of a conversation in the order asked
    on_cpu: bool = False

    def recipe(self, recipe: Recipe) -> Recipe:
        """The recipe of its adapters."""
        alora = recipe.methods["alora"]
        if self.all_linear:
            alora = alora.model_copy(update={"lora": alora.lora | {"target_modules": "all-linear"}})
        turn = self.rule_turn or recipe.rule_turn
        return recipe.model_copy(
            update={"rule_turn": turn, "adapters": recipe.methods | {"alora": alora}}
        )


NO_TAILS = {"additional_config": {"vllm_alora_kept_partial_blocks": 0}}
VLLMS_CHOICE = (
    "_apply_adapters",
    "LRUCacheLoRAModelManager.activate_adapter",
    "remove_oldest_adapter",
)  # together: one needs the others
EVERYTHING = "everything"
VARIANTS: Mapping[Traffic, tuple[Variant, ...]] = {
    FAN_OUT: (
        Variant(EVERYTHING),
        Variant("one rule after the other", one_by_one=True),
        Variant("the rule's title in every suffix", rule_turn="title"),
        Variant("the rule's policy in every suffix", rule_turn="policy"),
        Variant("weights in every linear layer", all_linear=True),
        Variant("every rule computes the conversation's tail", engine=NO_TAILS),
        Variant(
            "the others wait until the conversation is computed",
            without=("allocate_slots",),
            on_cpu=True,
        ),
        Variant("every rule hashes the conversation", without=("get_request_block_hasher",)),
        Variant("every rule looks the conversation up", without=("find_longest_cache_hit",)),
        Variant("adapters in place are looked up", without=("_apply_adapters",)),
        Variant(
            "the whole vocabulary's logits",
            engine={"additional_config": {"vllm_alora_answers": []}},
            on_cpu=True,
        ),
        Variant("B by rows", without=("_create_lora_modules",), on_cpu=True),
        Variant(
            "vLLM's LoRA operator",
            without=("add_lora_linear", "_create_lora_modules"),
            engine={
                "max_loras": 101
            },  # it gives the base's tokens the adapter in the last slot: that one stays empty
            on_cpu=True,
        ),
        Variant("embedding and output layer wrapped too", engine={"lora_target_modules": None}),
        Variant(
            "no blocks shared between adapters",
            without=("generate_block_hash_extra_keys", "get_request_block_hasher"),
            engine=NO_TAILS,
        ),
    ),
    WAVES: (
        Variant(EVERYTHING),
        Variant("the rules in the order asked", as_asked=True),
        Variant("vLLM chooses who gives way", without=VLLMS_CHOICE),
    ),
    FLEET: (
        Variant(EVERYTHING),
        Variant(
            "adapters are read in the step",
            engine={"additional_config": {"vllm_alora_prefetch": 0}},
        ),
        Variant("vLLM chooses who gives way", without=VLLMS_CHOICE),
    ),
}


@dataclass(frozen=True)
class Sample:
    """One run."""

    wall_ms: float
    engine_ms: float
    computed_tokens: int
    limit_ms: float
    adapter_loads: int
    swap_ins: int
    latencies_ms: tuple[float, ...]
    logits: tuple[float, ...]
    peak_memory_mib: float


def run(
    recipe: Recipe,
    variants: Mapping[Traffic, Sequence[Variant]] = VARIANTS,
    *,
    rounds: int = ROUNDS,
) -> AblationReport:
    """Measure every variant that means something here, round after round. Raises GuardError if two give different verdicts."""
    engines = [
        (traffic, each)
        for traffic, found in variants.items()
        for each in found
        if not (each.on_cpu and gpus())
    ]
    samples: dict[tuple[str, str], list[Sample]] = {
        (traffic.name, variant.name): [] for traffic, variant in engines
    }
    with (
        tempfile.TemporaryDirectory() as scratch,
        tqdm(total=rounds * len(engines), desc="measuring", unit="engine") as bar,
    ):
        recipes, most = (
            [variant.recipe(recipe) for _, variant in engines],
            max(traffic.adapters for traffic in variants),
        )
        folders = _adapters(Path(scratch), recipes, most)
        for number in range(rounds):
            for traffic, variant in engines if number % 2 else reversed(engines):
                bar.set_postfix_str(f"{traffic.name}: {variant.name}", refresh=False)
                own = variant.recipe(recipe)
                with ProcessPoolExecutor(
                    1, mp_context=multiprocessing.get_context("spawn")
                ) as process:
                    found = process.submit(
                        _measure, own, traffic, variant, folders[_kind(own)], number
                    ).result()
                samples[traffic.name, variant.name] += found
                bar.update()
            rows = _rows(
                recipe, engines, samples
            )  # after every round, so that a wrong engine is found before the hour is over
    return AblationReport(
        **provenance(),
        model=recipe.name,
        peak_memory_mib=max(row.peak_memory_mib for found in rows.values() for row in found),
        engine={
            key: str(value) for key, value in (recipe.engine | {"dtype": recipe.dtype}).items()
        },
        traffics=tuple(
            TrafficRows(
                traffic=traffic.name,
                what=str(traffic),
                runs=rounds * traffic.runs,
                rows=tuple(found),
            )
            for traffic, found in rows.items()
        ),
    )


def _rows(
    recipe: Recipe,
    engines: Sequence[tuple[Traffic, Variant]],
    samples: Mapping[tuple[str, str], Sequence[Sample]],
) -> dict[Traffic, list[AblationRow]]:
    """A row for each engine. Raises GuardError if one says otherwise than the whole engine."""
    rows: dict[Traffic, list[AblationRow]] = {}
    for traffic, variant in engines:
        same = _kind(variant.recipe(recipe)) == _kind(recipe)
        mine = samples[traffic.name, variant.name]
        difference = (
            _difference(recipe, traffic, variant, mine, samples[traffic.name, EVERYTHING])
            if same
            else None
        )
        rows.setdefault(traffic, []).append(_row(variant.name, mine, difference))
    return rows


def _kind(recipe: Recipe) -> str:
    """A name for what the recipe's adapters are told and have."""
    return fingerprint(recipe.rule_turn, recipe.methods["alora"].model_dump())


def _difference(
    recipe: Recipe,
    traffic: Traffic,
    variant: Variant,
    mine: Sequence[Sample],
    whole: Sequence[Sample],
) -> float:
    """The largest difference of a verdict's logit, in nats. Raises GuardError if it is more than the order of sums can explain."""
    found = max(
        abs(one - other)
        for a, b in zip(mine, whole, strict=True)
        for one, other in zip(a.logits, b.logits, strict=True)
    )
    if not found <= SAME_NATS.get(recipe.dtype, 0.5):
        remedy = "Run the tests of serve/: an idea changes the verdicts"
        raise GuardError(
            "two engines disagree",
            where=f"{traffic.name}, {variant.name}",
            got=f"{found:.3g} nats",
            remedy=remedy,
        )
    return found


def _adapters(root: Path, recipes: Sequence[Recipe], count: int) -> dict[str, dict[str, Path]]:
    """Adapters of every kind, by kind and name."""
    from serve.bench.random_adapter import save_random_adapters

    found: dict[str, dict[str, Path]] = {}
    for recipe in recipes:
        if (kind := _kind(recipe)) not in found:
            found[kind] = {
                f"adapter-{number}": root / kind / str(number) for number in range(count)
            }
            save_random_adapters(found[kind].values(), recipe, "alora", _prompts(recipe))
    return found


def _prompts(recipe: Recipe) -> PromptBuilder:
    return PromptBuilder.of(recipe)


def _measure(
    recipe: Recipe, traffic: Traffic, variant: Variant, folders: Mapping[str, Path], number: int
) -> list[Sample]:
    """In a process of its own: one engine and its runs."""
    from vllm.plugins import load_general_plugins

    from serve.engine.engine import GuardEngine, start_decoder

    load_general_plugins()
    _switch_off(variant.without)

    names = list(folders)[: traffic.adapters]
    args = {"max_loras": traffic.slots} | (
        {"max_cpu_loras": traffic.in_host_memory} if traffic.in_host_memory else {}
    )
    with GuardEngine(
        recipe,
        {name: folders[name] for name in names},
        start_backend=functools.partial(start_decoder, needs_seams=False),
        slots_first=not variant.as_asked,
        **(args | dict(variant.engine)),
    ) as engine:
        one = _fan_out if traffic.alpha is None else _fleet
        found = [
            one(engine, recipe, traffic, variant, names, number, repeat)
            for repeat in range(-2, traffic.runs)
        ]
    return found[2:]  # the first two are a warm-up


def _fan_out(
    engine: GuardEngine,
    recipe: Recipe,
    traffic: Traffic,
    variant: Variant,
    names: Sequence[str],
    number: int,
    repeat: int,
) -> Sample:
    """One conversation with all rules."""
    prompts = _prompts(recipe)
    said = (
        [load_rule(name).text(recipe.rule_turn) for name in rule_names("all")]
        if recipe.rule_turn != "none"
        else [told(recipe)]
    )
    texts = wordings(said, len(names))
    tokens = traffic.tokens + 7 * repeat
    messages = conversation(prompts, tokens, 100 * number + repeat + 2)
    requests = [ScoreRequest(messages, text, name) for text, name in zip(texts, names, strict=True)]

    def ask() -> list[Score]:
        started, scores = time.perf_counter(), list[Score]()
        for part in [[request] for request in requests] if variant.one_by_one else [requests]:
            waited_ms = 1000 * (time.perf_counter() - started)
            answered = _scores(engine.score(part), variant)
            scores += [
                replace(score, latency_ms=waited_ms + score.latency_ms) for score in answered
            ]  # from the first question on
        return scores

    needed = tokens + sum(len(prompts.suffix_ids(text)) for text in texts)
    alone = min(needed, recipe.context_tokens - 1) - len(prompts.suffix_ids(RULE_TEXT))
    limit = ScoreRequest(conversation(prompts, alone, 100 * number + repeat + 50), RULE_TEXT, None)
    return _sample(engine, ask, lambda: _scores(engine.score([limit]), variant))


def _fleet(
    engine: GuardEngine,
    recipe: Recipe,
    traffic: Traffic,
    variant: Variant,
    names: Sequence[str],
    number: int,
    repeat: int,
) -> Sample:
    """Many conversations with one rule each."""
    assert traffic.alpha is not None
    prompts, seed = _prompts(recipe), 100 * number + repeat + 2
    text, chosen = told(recipe), zipf(len(names), traffic.alpha, traffic.requests, seed)
    said = [
        conversation(prompts, traffic.tokens, seed * traffic.requests + each)
        for each in range(traffic.requests)
    ]

    def ask(adapters: Sequence[str | None]) -> list[Score]:
        asked: list[Call] = []

        def submit(place: int) -> Done:
            asked.append(one := engine.submit([ScoreRequest(said[place], text, adapters[place])]))
            return lambda: one.done

        closed_loop(submit, engine.step, len(said), WORKERS)
        return _scores([outcome for one in asked for outcome in one.results()], variant)

    return _sample(
        engine, lambda: ask([names[adapter] for adapter in chosen]), lambda: ask([None] * len(said))
    )


def _sample(
    engine: GuardEngine, ask: Callable[[], list[Score]], limit: Callable[[], list[Score]]
) -> Sample:
    engine.forget()
    engine_ms, read, brought, started = (
        engine.step_ms,
        engine.adapter_loads,
        engine.swap_ins,
        time.perf_counter(),
    )
    scores = ask()
    wall_ms, engine_ms = 1000 * (time.perf_counter() - started), engine.step_ms - engine_ms
    read, brought, peak = (
        engine.adapter_loads - read,
        engine.swap_ins - brought,
        peak_memory_mib(),
    )
    engine.forget()
    limit_ms = engine.step_ms
    limit()
    limit_ms = engine.step_ms - limit_ms
    latencies, logits = (
        tuple(score.latency_ms for score in scores),
        tuple(score.logit for score in scores),
    )
    return Sample(
        wall_ms,
        engine_ms,
        sum(score.computed_tokens for score in scores),
        limit_ms,
        read,
        brought,
        latencies,
        logits,
        peak,
    )


def _scores(outcomes: Sequence[object], variant: Variant) -> list[Score]:
    scores = [outcome for outcome in outcomes if isinstance(outcome, Score)]
    if refused := next((outcome for outcome in outcomes if not isinstance(outcome, Score)), None):
        raise GuardError(
            "a benchmark request was refused",
            where=variant.name,
            got=refused,
            remedy="Run `make doctor`",
        )
    return scores


def _switch_off(names: Sequence[str]) -> None:
    from vllm_alora import seams
    from vllm_alora.seam import is_installed, uninstall

    for name in names:
        (found,) = (
            one for one in seams() if f".{one.target.replace(':', '.')}".endswith(f".{name}")
        )
        uninstall(found)
        if is_installed(found):
            raise RuntimeError(f"{name} could not be switched off")


def _row(name: str, samples: Sequence[Sample], difference_nats: float | None) -> AblationRow:
    walls = [sample.wall_ms for sample in samples]
    return AblationRow(
        variant=name,
        wall_ms=statistics.median(walls),
        wall_ms_min=min(walls),
        wall_ms_max=max(walls),
        engine_ms=statistics.median(sample.engine_ms for sample in samples),
        p95_ms=float(
            np.percentile([latency for sample in samples for latency in sample.latencies_ms], 95)
        ),
        computed_tokens=round(statistics.median(sample.computed_tokens for sample in samples)),
        limit_ms=statistics.median(sample.limit_ms for sample in samples),
        adapter_loads=round(statistics.median(sample.adapter_loads for sample in samples)),
        swap_ins=round(statistics.median(sample.swap_ins for sample in samples)),
        difference_nats=difference_nats,
        peak_memory_mib=max(sample.peak_memory_mib for sample in samples),
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m serve.bench.ablation.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", default="tiny", help="a base model of recipes/models (default: %(default)s)"
    )
    parser.add_argument(
        "--traffic", choices=[traffic.name for traffic in VARIANTS], help="default: all of them"
    )
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help="engines of each kind (default: %(default)s)"
    )
    parser.add_argument(
        "--runs", type=Path, default=Runs().root, help="where the results go (default: %(default)s)"
    )
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    return arguments


@exits_cleanly
def main() -> None:
    """Measure, write the report and the plot, print the table."""
    arguments = _arguments()
    variants = {
        traffic: found
        for traffic, found in VARIANTS.items()
        if arguments.traffic in (None, traffic.name)
    }
    report = run(load_recipe(arguments.model), variants, rounds=arguments.rounds)
    publish(report, arguments.runs / "ablation_bench.json", draw, table)


if __name__ == "__main__":
    main()
