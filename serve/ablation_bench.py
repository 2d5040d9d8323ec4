"""`make bench-ablation`: what each of the engine's ideas brings, measured by switching it off. Knows nothing of what the verdicts mean.

A fan-out, one conversation with many rules, in engines that lack one thing each. Every engine is a process of its own; the engines take
turns, with the same conversations and adapters.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from tqdm import tqdm

from guard.errors import GuardError, exits_cleanly
from guard.layout import Runs, fingerprint
from guard.prompt import PromptBuilder
from guard.provenance import gpus, peak_memory_mib, provenance
from guard.recipe import Recipe, load_recipe
from guard.rule import RuleTurn, load_rule, rule_names
from guard.yaml_file import Strict
from serve.bench_report import BenchReport, publish
from serve.workload import RULE_TEXT, conversation, told, wordings

if TYPE_CHECKING:
    from serve.engine import GuardEngine

TOKENS, RULES = 1000, 100
CONVERSATIONS = 5  # of each engine in each round
ROUNDS = 3


@dataclass(frozen=True)
class Variant:
    """An engine that lacks something: seams of the plugin by their targets' last names, engine arguments, what adapters are told and have.

    `on_cpu`: what is switched off is there on a CPU only.
    """

    name: str
    without: tuple[str, ...] = ()
    engine: Mapping[str, Any] = field(default_factory=dict)
    rule_turn: RuleTurn | None = None
    all_linear: bool = False  # the adapters have weights in every linear layer
    one_by_one: bool = False
    on_cpu: bool = False

    def recipe(self, recipe: Recipe) -> Recipe:
        """The recipe of its adapters."""
        alora = recipe.adapters["alora"]
        if self.all_linear:
            alora = alora.model_copy(update={"lora": alora.lora | {"target_modules": "all-linear"}})
        turn = self.rule_turn or recipe.rule_turn
        return recipe.model_copy(update={"rule_turn": turn, "adapters": recipe.adapters | {"alora": alora}})


NO_TAILS = {"additional_config": {"vllm_alora_kept_tails": 0}}
EVERYTHING = "everything"
VARIANTS = (
    Variant(EVERYTHING),
    Variant("one rule after the other", one_by_one=True),
    Variant("the rule's title in every suffix", rule_turn="title"),
    Variant("weights in every linear layer", all_linear=True),
    Variant("every rule computes the conversation's tail", engine=NO_TAILS),
    Variant("the others wait until the conversation is computed", without=("allocate_slots",), on_cpu=True),
    Variant("every rule hashes the conversation", without=("get_request_block_hasher",)),
    Variant("every rule looks the conversation up", without=("find_longest_cache_hit",)),
    Variant("adapters in place are looked up", without=("_apply_adapters",)),
    Variant("the whole vocabulary's logits", engine={"additional_config": {"vllm_alora_answers": []}}, on_cpu=True),
    Variant("B by rows", without=("_create_lora_modules",), on_cpu=True),
    Variant("vLLM's LoRA operator", without=("add_lora_linear", "_create_lora_modules"), on_cpu=True),
    Variant("embedding and output layer wrapped too", engine={"lora_target_modules": None}),
    Variant("no blocks shared between adapters", without=("generate_block_hash_extra_keys", "get_request_block_hasher"), engine=NO_TAILS),
)


class AblationRow(Strict):
    """One engine: medians over its conversations in all rounds, in ms, of all verdicts of one conversation."""

    variant: str
    wall_ms: float
    wall_ms_min: float
    wall_ms_max: float
    engine_ms: float
    computed_tokens: int
    limit_ms: float  # time in steps of one base prompt as long as the conversation and all of its suffixes, in the same engine
    adapters_brought: int  # copied into a slot while the clock ran: each has its own
    peak_memory_mib: float  # resident, of the engine's process


class AblationReport(BenchReport):
    """Everything in `runs/ablation_bench.json`."""

    prompt_tokens: int
    rules: int
    conversations: int
    engine: dict[str, str]
    rows: tuple[AblationRow, ...]


@dataclass(frozen=True)
class Sample:
    """One conversation."""

    wall_ms: float
    engine_ms: float
    computed_tokens: int
    limit_ms: float
    adapters_brought: int
    peak_memory_mib: float


def run(
    recipe: Recipe, variants: Sequence[Variant] = VARIANTS, *, tokens: int = TOKENS, rules: int = RULES, rounds: int = ROUNDS
) -> AblationReport:
    """Measure every variant that means something here, round after round."""
    variants = [variant for variant in variants if not (variant.on_cpu and gpus())]
    samples: dict[str, list[Sample]] = {variant.name: [] for variant in variants}
    with tempfile.TemporaryDirectory() as scratch, tqdm(total=rounds * len(variants), desc="measuring", unit="engine") as bar:
        folders = _adapters(Path(scratch), [variant.recipe(recipe) for variant in variants], rules)
        for number in range(rounds):
            for variant in variants if number % 2 else reversed(variants):
                bar.set_postfix_str(variant.name, refresh=False)
                with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
                    own = variant.recipe(recipe)
                    samples[variant.name] += process.submit(_measure, own, variant, folders[_kind(own)], tokens, number).result()
                bar.update()
    engine = {key: str(value) for key, value in (recipe.engine | {"dtype": recipe.dtype}).items()}
    rows = tuple(_row(name, found) for name, found in samples.items())
    return AblationReport(
        **provenance(), model=recipe.name, peak_memory_mib=max(row.peak_memory_mib for row in rows), prompt_tokens=tokens, rules=rules,
        conversations=rounds * CONVERSATIONS, engine=engine, rows=rows,
    )  # fmt: skip


def _kind(recipe: Recipe) -> str:
    """A name for what the recipe's adapters are told and have."""
    return fingerprint(recipe.rule_turn, recipe.adapters["alora"].model_dump())


def _adapters(root: Path, recipes: Sequence[Recipe], rules: int) -> dict[str, dict[str, Path]]:
    """Adapters of every kind, by kind and name."""
    from serve.random_adapter import save_random_adapters

    found: dict[str, dict[str, Path]] = {}
    for recipe in recipes:
        if (kind := _kind(recipe)) not in found:
            prompts = PromptBuilder.from_base(recipe.base_path, revision=recipe.commit, answer_prefix=recipe.answer_prefix)
            found[kind] = {f"adapter-{number}": root / kind / str(number) for number in range(rules)}
            save_random_adapters(found[kind].values(), recipe, "alora", prompts)
    return found


def _measure(recipe: Recipe, variant: Variant, folders: Mapping[str, Path], tokens: int, number: int) -> list[Sample]:
    """In a process of its own: one engine and CONVERSATIONS fan-outs."""
    from vllm.plugins import load_general_plugins

    from serve import core

    load_general_plugins()
    _switch_off(variant.without)
    vars(core)["patched"] = dict  # else it would not start
    from serve.engine import GuardEngine, Score, ScoreRequest

    prompts = PromptBuilder.from_base(recipe.base_path, revision=recipe.commit, answer_prefix=recipe.answer_prefix)
    texts = wordings([load_rule(name).title for name in rule_names("all")] if recipe.rule_turn == "title" else [told(recipe)], len(folders))
    suffixes = sum(len(prompts.suffix_ids(text)) for text in texts)
    samples = []
    with GuardEngine(recipe, folders, max_loras=len(folders), **variant.engine) as engine:
        for repeat in range(-2, CONVERSATIONS):  # the first two are a warm-up
            messages = conversation(prompts, tokens + 7 * repeat, 100 * number + repeat + 2)
            requests = [ScoreRequest(messages, text, name) for text, name in zip(texts, folders, strict=True)]
            engine.forget()
            engine_ms, filled, started = engine.step_ms, engine.slots_filled, time.perf_counter()
            asked = [[request] for request in requests] if variant.one_by_one else [requests]
            outcomes = [outcome for part in asked for outcome in engine.score(part)]
            wall_ms, engine_ms = 1000 * (time.perf_counter() - started), engine.step_ms - engine_ms
            scores = [outcome for outcome in outcomes if isinstance(outcome, Score)]
            if len(scores) < len(outcomes):
                raise GuardError("a benchmark request was refused", where=variant.name, remedy="Run `make doctor`")
            brought, computed = engine.slots_filled - filled, sum(score.computed_tokens for score in scores)
            if repeat >= 0:
                limit_ms = _limit_ms(
                    engine, prompts, min(tokens + 7 * repeat + suffixes, recipe.context_tokens - 1), 100 * number + repeat + 50
                )
                samples.append(Sample(wall_ms, engine_ms, computed, limit_ms, brought, peak_memory_mib()))
    return samples


def _limit_ms(engine: GuardEngine, prompts: PromptBuilder, tokens: int, seed: int) -> float:
    """Time in steps of one prompt of about so many tokens, by the base alone."""
    from serve.engine import ScoreRequest

    request = ScoreRequest(conversation(prompts, tokens - len(prompts.suffix_ids(RULE_TEXT)), seed), RULE_TEXT, None)
    engine.forget()
    before = engine.step_ms
    engine.score([request])
    return engine.step_ms - before


def _switch_off(names: Sequence[str]) -> None:
    from vllm_alora import seams
    from vllm_alora.seam import is_installed, uninstall

    found = {one.target.rpartition(":")[2].rpartition(".")[2]: one for one in seams()}
    for name in names:
        uninstall(found[name])
        if is_installed(found[name]):
            raise RuntimeError(f"{name} could not be switched off")


def _row(name: str, samples: Sequence[Sample]) -> AblationRow:
    walls = [sample.wall_ms for sample in samples]
    return AblationRow(
        variant=name,
        wall_ms=statistics.median(walls),
        wall_ms_min=min(walls),
        wall_ms_max=max(walls),
        engine_ms=statistics.median(sample.engine_ms for sample in samples),
        computed_tokens=round(statistics.median(sample.computed_tokens for sample in samples)),
        limit_ms=statistics.median(sample.limit_ms for sample in samples),
        adapters_brought=round(statistics.median(sample.adapters_brought for sample in samples)),
        peak_memory_mib=max(sample.peak_memory_mib for sample in samples),
    )


def table(report: AblationReport) -> str:
    """The report as text, as times of the engine that has everything."""
    whole = report.rows[0]
    width = max(len(row.variant) for row in report.rows)
    head = f"{'engine':<{width}} | {'ms (min to max)':>22} {'in steps':>9} {'of limit':>8} {'tokens':>7} "
    head += f"{'brought':>7} {'MiB':>6} | {'times':>6}"
    lines = [head, "-" * len(head)]
    for row in report.rows:
        wall = f"{row.wall_ms:.0f} ({row.wall_ms_min:.0f} to {row.wall_ms_max:.0f})"
        lines.append(
            f"{row.variant:<{width}} | {wall:>22} {row.engine_ms:>9.0f} {row.engine_ms / row.limit_ms:>8.2f} {row.computed_tokens:>7} "
            f"{row.adapters_brought:>7} {row.peak_memory_mib:>6.0f} | {row.wall_ms / whole.wall_ms:>6.2f}"
        )
    notes = [
        "of limit: time in steps over that of one base prompt as long as the conversation and all of its suffixes, in the same engine.",
        "brought: adapters copied into a slot. MiB: peak memory of the engine's process.",
    ]
    return "\n".join([*lines, *notes, caption(report)])


def caption(report: AblationReport) -> str:
    """Where the numbers come from, in one line."""
    return (
        f"{report.rules} rules on a conversation of about {report.prompt_tokens:,} tokens, time to all verdicts, "
        f"median of {report.conversations} conversations; {report.model} on {report.hardware}; commit {report.commit}; random adapters."
    )


def draw(report: AblationReport, path: Path) -> None:
    """Write the plot: a bar for each engine."""
    figure = Figure(figsize=(8, 0.45 * len(report.rows) + 1.6), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    rows = report.rows[::-1]
    spread = [[row.wall_ms - row.wall_ms_min for row in rows], [row.wall_ms_max - row.wall_ms for row in rows]]
    axes.barh([row.variant for row in rows], [row.wall_ms for row in rows], xerr=spread, color="#D55E00", alpha=0.8, ecolor="#444444")
    axes.set_xscale("log")
    axes.set_xlabel("ms to all verdicts")
    axes.grid(axis="x", linewidth=0.4, alpha=0.6)
    figure.supxlabel("\n".join(textwrap.wrap(caption(report), 120)), fontsize=7, color="#444444")
    figure.savefig(path)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m serve.ablation_bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny", help="a base model of recipes/models (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="engines of each kind (default: %(default)s)")
    parser.add_argument("--runs", type=Path, default=Runs().root, help="where the results go (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    return arguments


@exits_cleanly
def main() -> None:
    """Measure, write the report and the plot, print the table."""
    arguments = _arguments()
    report = run(load_recipe(arguments.model), rounds=arguments.rounds)
    publish(report, arguments.runs / "ablation_bench.json", draw, table)


if __name__ == "__main__":
    main()
