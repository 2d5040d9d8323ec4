"""A LoRA folded into the base's weights: `python -m serve.merge --rule medical_advice`, entry of `make merge`.

For a deployment with one rule, or with one main rule and a tail of others in a second engine. The merged checkpoint is a base of its own in
a folder beside the adapter. Base and adapter stay as they are, so there is nothing to undo: whoever wants the base again loads it.
An aLoRA cannot be merged: its weights act from the rule's turn on, in the base they would act on the conversation too.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from guard.card import Card, load_card
from guard.errors import GuardError, exits_cleanly
from guard.example import Message
from guard.layout import Runs
from guard.prompt import PromptBuilder
from guard.recipe import Recipe, load_recipe
from guard.verdict import Verdict
from guard.yaml_file import validate
from serve.adapter import Requirements, trained
from serve.engine import GuardEngine, Refusal, ScoreRequest
from serve.traffic import Done, closed_loop
from serve.workload import conversation

CARD = "card.json"
TOKENS, CHECKS, WORKERS, REPEATS = 300, 48, 16, 5  # of the comparison


def merge(recipe: Recipe, adapter: Path, folder: Path) -> None:
    """Write the base with the adapter's weights in it to `folder`, a checkpoint with tokenizer and the adapter's card.

    Merged in float32 and rounded once, to the recipe's type. A merge that is cut off leaves what was there. Raises GuardError for an
    aLoRA, and for an adapter that the recipe's base does not have.
    """
    card = load_card(adapter)
    if card.method == "alora":
        remedy = f"Merge the rule's LoRA, {adapter.with_name('lora')}, or serve the aLoRA as it is"
        what = "an aLoRA cannot be merged: its weights act from the rule's turn on, in the base they would act on the conversation too"
        raise GuardError(what, where=adapter, remedy=remedy)
    Requirements.of(recipe).admit(card.rule, adapter)

    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = AutoModelForCausalLM.from_pretrained(recipe.base_path, revision=recipe.commit, dtype=torch.float32)
    merged: Any = PeftModel.from_pretrained(base, str(adapter)).merge_and_unload(safe_merge=True)
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    merged.to(getattr(torch, recipe.dtype)).save_pretrained(part)
    AutoTokenizer.from_pretrained(recipe.base_path, revision=recipe.commit).save_pretrained(part)
    card.save(part)
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


class MergedRule:
    """One rule, asked of the base that has its LoRA in it. `engine_overrides` are vLLM EngineArgs. For one thread.

    Raises GuardError if `folder` is no merged checkpoint of the recipe's base, or vLLM cannot start.
    """

    def __init__(self, recipe: Recipe, folder: Path, **engine_overrides: Any) -> None:
        self.card = _card(recipe, folder)
        self.engine = GuardEngine(recipe.model_copy(update={"base": str(folder.resolve()), "revision": None}), {}, **engine_overrides)

    def request(self, messages: Sequence[Message]) -> ScoreRequest:
        """The question for `engine.ask`, where many are under way at once."""
        return ScoreRequest(tuple(messages), self.card.rule_text, None)

    def check(self, messages: Sequence[Message]) -> Verdict:
        """The rule's verdict on a conversation. Raises GuardError where there is none."""
        (outcome,) = self.engine.score([self.request(messages)])
        if isinstance(outcome, Refusal):
            raise GuardError("the conversation was not judged", where=self.card.rule, got=outcome, remedy="Run `make doctor`")
        return self.card.calibration.verdict(self.card.rule, outcome.logit)

    def close(self) -> None:
        """Give the engine's memory back."""
        self.engine.close()

    def __enter__(self) -> MergedRule:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _card(recipe: Recipe, folder: Path) -> Card:
    path = folder / CARD
    try:
        card = validate(json.loads(path.read_text(encoding="utf-8")), Card, where=path)
    except (OSError, ValueError) as error:
        raise GuardError(f"no merged checkpoint: {error}", where=folder, remedy="Run `make merge` for the rule") from error
    again = f"Run `make merge RULE={card.rule} MODEL={recipe.name}`"
    if (card.base, card.base_revision) != (recipe.base, recipe.base_revision):
        raise GuardError("merged into another base", where=folder, got=f"{card.base} {card.base_revision[:12]}", remedy=again)
    if card.prompt_hash != Requirements.of(recipe).prompts.hash:
        raise GuardError("trained on another wording or layout of the prompt", where=folder, remedy=f"`{card.retrain}`, then {again}")
    return card


def throughput(recipe: Recipe, adapters: dict[str, Path], merged: Path) -> dict[str, list[float]]:
    """Verdicts per second of the merged rule and of `adapters` (name -> folder) in an engine of their own, in turns.

    WORKERS conversations of TOKENS tokens are under way at once, each asked one rule.
    """
    prompts = PromptBuilder.from_base(recipe.base_path, revision=recipe.commit, answer_prefix=recipe.answer_prefix)
    rates: dict[str, list[float]] = {name: [] for name in ("merged", *adapters)}
    with MergedRule(recipe, merged) as one, GuardEngine(recipe, adapters) as other:
        for repeat in range(-1, REPEATS):  # the first is a warm-up
            asked = [conversation(prompts, TOKENS, CHECKS * (repeat + 2) + number) for number in range(CHECKS)]
            for name in rates:
                engine = one.engine if name == "merged" else other
                engine.forget()

                def submit(number: int, name: str = name, engine: GuardEngine = engine, asked: list[tuple[Message, ...]] = asked) -> Done:
                    messages = asked[number]
                    request = one.request(messages) if name == "merged" else ScoreRequest(messages, engine.rules[name].rule_text, name)
                    check = engine.ask([request])
                    return lambda: check.done

                timed = closed_loop(submit, engine.step, CHECKS, WORKERS)
                if repeat >= 0:
                    rates[name].append(timed.per_second)
    return rates


@exits_cleanly
def main() -> None:
    """Merge, then say what it brings."""
    parser = argparse.ArgumentParser(prog="python -m serve.merge", description="Fold a rule's LoRA into the base's weights.")
    parser.add_argument("--rule", required=True, help="a rule with a trained LoRA")
    parser.add_argument("--model", default="tiny", help="a base model of recipes/models (default: %(default)s)")
    parser.add_argument("--runs", type=Path, default=Runs().root, help="where the adapters are (default: %(default)s)")
    arguments = parser.parse_args()
    recipe, runs = load_recipe(arguments.model), Runs(arguments.runs)
    lora = trained(runs, recipe.name, "lora", arguments.rule)[arguments.rule]
    merged = lora.with_name("merged")
    merge(recipe, lora, merged)
    print(f"written: {merged}; it is asked as serve.merge.MergedRule, or as any checkpoint without an adapter", flush=True)
    alora = lora.with_name("alora")
    rates = throughput(recipe, {"lora": lora} | ({"alora": alora} if (alora / CARD).is_file() else {}), merged)
    print(f"verdicts per second, one rule, {WORKERS} conversations of {TOKENS} tokens under way:")
    for name, each in rates.items():
        print(f"  {name:<7}{statistics.median(each):>7.1f} ({min(each):.1f} to {max(each):.1f})")


if __name__ == "__main__":
    main()
