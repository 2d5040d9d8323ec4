"""A LoRA folded into the base's weights: `python -m serve.merge --rule medical_advice`, entry of `make merge`.

For a server of one rule (`make up RULE=medical_advice MERGED=1`), or of one main rule beside one of the others. The merged checkpoint is a
base of its own in a folder beside the adapter. Base and adapter stay as they are, so there is nothing to undo: whoever wants the base
again loads it. An aLoRA cannot be merged: its weights act from its invocation on, in the base they would act on the conversation too.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from guard.card import Card, load_card
from guard.errors import GuardError, exits_cleanly
from guard.files.yaml_file import validate
from guard.layout import Runs
from guard.prompt import PromptBuilder
from guard.provenance import peak_memory_mib, provenance
from guard.recipe import Recipe, load_recipe
from serve.bench.report import BenchReport
from serve.bench.traffic import Done, closed_loop
from serve.bench.workload import conversation
from serve.engine import Call, GuardEngine, Refusal, Score, ScoreRequest
from serve.engine.adapter import Requirements, trained

CARD = "card.json"
MERGED = "merged"
TOKENS, CHECKS, WORKERS, REPEATS = 300, 48, 16, 5  # of the comparison


def merge(recipe: Recipe, adapter: Path, folder: Path) -> None:
    """Write the base with the adapter's weights in it to `folder`, a checkpoint with tokenizer and the adapter's card.

    Merged in float32 and rounded once, to the recipe's type: in bfloat16 the sum of base and adapter loses what the adapter alone would
    keep, and the command says how much. Raises GuardError for an aLoRA, and for an adapter of another base.
    """
    card = load_card(adapter)
    if card.method == "alora":
        remedy = f"Merge the rule's LoRA, {adapter.with_name('lora')}, or serve the aLoRA as it is"
        what = "an aLoRA cannot be merged: its weights act from its invocation on, in the base they would act on the conversation too"
        raise GuardError(what, where=adapter, remedy=remedy)
    Requirements.of(recipe).admit(card.rule, adapter)

    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = AutoModelForCausalLM.from_pretrained(
        recipe.base_path, revision=recipe.commit, dtype=torch.float32
    )
    merged: Any = PeftModel.from_pretrained(base, str(adapter)).merge_and_unload(safe_merge=True)
    part, old = folder.with_name(f".{folder.name}.part"), folder.with_name(f".{folder.name}.old")
    for leftover in (part, old):
        shutil.rmtree(leftover, ignore_errors=True)
    merged.to(getattr(torch, recipe.dtype)).save_pretrained(part)
    AutoTokenizer.from_pretrained(recipe.base_path, revision=recipe.commit).save_pretrained(part)
    card.save(part)
    if folder.exists():
        folder.rename(old)
    part.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def merged_engine(recipe: Recipe, folder: Path, **engine_overrides: Any) -> GuardEngine:
    """An engine of the base that has a rule's LoRA in it, with this rule alone. `engine_overrides` are vLLM EngineArgs.

    Raises GuardError if `folder` is no merged checkpoint of the recipe's base and of the LoRA beside it, or vLLM cannot start.
    """
    card = _card(recipe, folder)
    plain = {key: value for key, value in recipe.engine.items() if "lora" not in key}
    own = recipe.model_copy(
        update={"base": str(folder.resolve()), "revision": None, "engine": plain}
    )
    return GuardEngine(own, {}, merged=card, enable_lora=False, **engine_overrides)


def _card(recipe: Recipe, folder: Path) -> Card:
    path = folder / CARD
    try:
        card = validate(json.loads(path.read_text(encoding="utf-8")), Card, where=path)
    except (OSError, ValueError) as error:
        raise GuardError(
            f"no merged checkpoint: {error}",
            where=folder,
            remedy="Run `make merge RULE=…` for the rule",
        ) from error
    again = f"Run `make merge RULE={card.rule} MODEL={recipe.name}`"
    if (folder.with_name("lora") / CARD).is_file():
        merged, card = (
            card,
            load_card(folder.with_name("lora")),
        )  # which may have a newer threshold for the same weights
        if card.weights_sha256 != merged.weights_sha256:
            raise GuardError(
                "the rule's LoRA was trained again since it was merged", where=folder, remedy=again
            )
    if (card.base, card.base_revision) != (recipe.base, recipe.base_revision):
        raise GuardError(
            "merged into another base",
            where=folder,
            got=f"{card.base} {card.base_revision[:12]}",
            remedy=again,
        )
    if (
        card.prompt_hash
        != PromptBuilder.from_base(str(folder), answer_prefix=recipe.answer_prefix).hash
    ):  # by the tokenizer it is asked with
        raise GuardError(
            "trained on another wording or layout of the prompt",
            where=folder,
            remedy=f"`{card.retrain}`, then {again}",
        )
    return card


@dataclass(frozen=True)
class Compared:
    """Verdicts per second of each repeat, and the logits of the last, by name."""

    rates: dict[str, list[float]]
    logits: dict[str, list[float]]


def compare(recipe: Recipe, adapters: Mapping[str, Path], merged: Path) -> Compared:
    """The merged rule, then `adapters` (name -> folder) in turns, each engine by itself: two may not fit beside each other.

    WORKERS conversations of TOKENS tokens are under way at once, each asked one rule. Raises GuardError where one was not judged.
    """
    prompts = PromptBuilder.of(recipe)
    found = Compared({}, {})
    with merged_engine(recipe, merged) as engine:
        (card,) = engine.rules.values()
        _measure(
            found, engine, {MERGED: lambda said: ScoreRequest(said, card.rule_text, None)}, prompts
        )
    with GuardEngine(recipe, adapters) as engine:
        texts = {name: card.rule_text for name, card in engine.rules.items()}
        _measure(
            found,
            engine,
            {
                name: lambda said, name=name: ScoreRequest(said, texts[name], name)
                for name in adapters
            },
            prompts,
        )
    return found


def _measure(
    found: Compared,
    engine: GuardEngine,
    asks: Mapping[str, Callable[..., ScoreRequest]],
    prompts: PromptBuilder,
) -> None:
    found.rates.update({name: [] for name in asks})
    for repeat in range(-1, REPEATS):  # the first is a warm-up
        said = [
            conversation(prompts, TOKENS, CHECKS * (repeat + 2) + number)
            for number in range(CHECKS)
        ]
        for name in random.Random(repeat).sample(list(asks), len(asks)):
            engine.forget()
            checks: list[Call] = []

            def submit(
                number: int,
                name: str = name,
                said: Sequence[Any] = said,
                checks: list[Call] = checks,
            ) -> Done:
                checks.append(check := engine.submit([asks[name](said[number])]))
                return lambda: check.done

            timed = closed_loop(submit, engine.step, CHECKS, WORKERS)
            outcomes = [outcome for check in checks for outcome in check.results()]
            if refused := next(
                (outcome for outcome in outcomes if isinstance(outcome, Refusal)), None
            ):
                raise GuardError(
                    "a conversation was not judged",
                    where=name,
                    got=refused,
                    remedy="Run `make doctor`",
                )
            if repeat >= 0:
                found.rates[name].append(timed.per_second)
                found.logits[name] = [
                    outcome.logit for outcome in outcomes if isinstance(outcome, Score)
                ]


class MergeReport(BenchReport):
    """Everything in `runs/merge_bench.json`."""

    rule: str
    dtype: str
    workers: int
    conversation_tokens: int
    verdicts_per_second: dict[str, list[float]]  # of each repeat, by what was asked
    difference_nats: float  # the largest of a logit, merged against LoRA


def table(report: MergeReport) -> str:
    """The report as text."""
    lines = [
        f"verdicts per second, one rule, {report.workers} conversations of {report.conversation_tokens} tokens under way:"
    ]
    for name, rates in report.verdicts_per_second.items():
        lines.append(
            f"  {name:<7}{statistics.median(rates):>7.1f} ({min(rates):.1f} to {max(rates):.1f})"
        )
    return "\n".join(
        [
            *lines,
            f"largest difference of a logit from the LoRA's, {report.dtype}: {report.difference_nats:.2g} nats",
        ]
    )


@exits_cleanly
def main() -> None:
    """Merge, then say what it brings."""
    parser = argparse.ArgumentParser(
        prog="python -m serve.merge", description="Fold a rule's LoRA into the base's weights."
    )
    parser.add_argument("--rule", required=True, help="a rule with a trained LoRA")
    parser.add_argument(
        "--model", default="tiny", help="a base model of recipes/models (default: %(default)s)"
    )
    parser.add_argument(
        "--runs",
        type=Path,
        default=Runs().root,
        help="where the adapters are (default: %(default)s)",
    )
    arguments = parser.parse_args()
    recipe, runs = load_recipe(arguments.model), Runs(arguments.runs)
    found = trained(runs, recipe.name, "lora", arguments.rule)
    if len(found) > 1:
        raise GuardError(
            "a base takes in one rule's LoRA", got=arguments.rule, remedy="Name one rule"
        )
    (lora,) = found.values()
    merged, alora = lora.with_name(MERGED), lora.with_name("alora")
    merge(recipe, lora, merged)
    print(
        f"written: {merged}; `make up RULE={arguments.rule} MODEL={recipe.name} MERGED=1` serves it, as does any server of checkpoints",
        flush=True,
    )
    compared = compare(
        recipe, {"lora": lora} | ({"alora": alora} if (alora / CARD).is_file() else {}), merged
    )
    largest = max(
        abs(one - other)
        for one, other in zip(compared.logits[MERGED], compared.logits["lora"], strict=True)
    )
    report = MergeReport(
        **provenance(),
        model=recipe.name,
        peak_memory_mib=peak_memory_mib(),
        rule=arguments.rule,
        dtype=recipe.dtype,
        workers=WORKERS,
        conversation_tokens=TOKENS,
        verdicts_per_second=compared.rates,
        difference_nats=largest,
    )
    report.save(arguments.runs / "merge_bench.json")
    print(table(report))
    print(f"written: {arguments.runs / 'merge_bench.json'}")


if __name__ == "__main__":
    main()
