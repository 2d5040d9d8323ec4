"""A LoRA folded into the base's weights: `python -m serve.merge --rule medical_advice`.

Entry of `make merge`, for a server of a main rule (`make up RULE=medical_advice MERGED=1`), and of
others beside it. The merged checkpoint is a base of its own in a folder beside the adapter; base
and adapter stay as they are. Knows nothing of how fast it is.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from guard.base_files import folder_digest
from guard.errors import GuardError, exits_cleanly
from guard.layout import Runs
from guard.method import METHODS, ActsFrom
from guard.prompt.decoder import PromptBuilder
from guard.recipe import Recipe, load_recipe
from guard.weights.card import CARD, Card, file_digests, load_card, read_card
from guard.weights.low_rank import peft_config, write_sum
from serve.engine import GuardEngine
from serve.engine.adapter import Requirements, check_code, trained
from serve.registry.registry import Registry
from serve.untrained import is_zero

MERGED = "merged"
TAIL = "tail"  # the folder beside it, of other rules' LoRAs as their differences to the merged one
NO_TAIL: Mapping[str, Path] = MappingProxyType({})
RANKS = (16, 32, 64, 128, 256, 320, 512)  # which vLLM knows as max_lora_rank
# Why weights that act from there on cannot be merged.
UNMERGEABLE: dict[ActsFrom, str] = {
    "suffix": "its weights act from its invocation on, in the base they would act on the "
    "conversation too",
    "output": "its weights are no part of the base",
}


def mergeable_method(recipe: Recipe) -> str:
    """The recipe's first method that acts on the whole prompt. Raises GuardError for none."""
    for name in recipe.methods:
        if recipe.kind == "decoder" and METHODS[name].acts_from not in UNMERGEABLE:
            return name
    mergeable = [name for name, method in METHODS.items() if method.acts_from not in UNMERGEABLE]
    where, got = f"recipe {recipe.name}: methods", ", ".join(recipe.methods)
    remedy = f"Add a section to the recipe and train it: {', '.join(mergeable)}"
    raise GuardError("no method of the recipe can be merged", where=where, got=got, remedy=remedy)


def mergeable_adapter(recipe: Recipe, runs: Runs, rule: str) -> Path:
    """The rule's adapter. Raises GuardError if it is not trained, or `rule` names several."""
    method = mergeable_method(recipe)
    champions = Registry(runs).champions(recipe.name, method)
    folders = trained(runs, recipe.name, method, rule, champions)
    if len(folders) > 1:
        raise GuardError(
            "only one rule can be merged into a base", got=rule, remedy="Name one rule"
        )
    (folder,) = folders.values()
    if is_zero(folder):
        problem, remedy = "the champion is a version 0, without weights", "`make publish` some"
        raise GuardError(problem, where=folder, got=rule, remedy=remedy)
    return folder


def merge(recipe: Recipe, adapter: Path, folder: Path) -> None:
    """Write the base with the adapter's weights in it to `folder`.

    A checkpoint with tokenizer and the adapter's card, which pins the checkpoint too. Merged in
    float32 and rounded once, to the recipe's type: in bfloat16 the sum of base and adapter loses
    what the adapter alone would keep, and the benchmark says how much. Raises GuardError for
    weights that do not act on the whole prompt, and for an adapter of another base.
    """
    if recipe.serving_quantization:
        where, remedy = f"recipe {recipe.name}: serving_quantization", "Serve the LoRA as it is"
        raise GuardError("merged weights are not quantised", where=where, remedy=remedy)
    card = _mergeable_card(recipe, adapter)
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    _write_checkpoint(recipe, adapter, part)
    card.model_copy(update={"merged_revision": folder_digest(part, str(folder))}).save(part)
    _put_in_place(part, folder)


def _write_checkpoint(recipe: Recipe, adapter: Path, folder: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = AutoModelForCausalLM.from_pretrained(
        recipe.base_path, revision=recipe.commit, dtype=torch.float32
    )
    merged: Any = PeftModel.from_pretrained(base, str(adapter)).merge_and_unload(safe_merge=True)
    merged.to(getattr(torch, recipe.dtype)).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(recipe.base_path, revision=recipe.commit)
    tokenizer.save_pretrained(folder)


def _put_in_place(part: Path, folder: Path) -> None:
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    part.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def merged_engine(
    recipe: Recipe, folder: Path, tail: Mapping[str, Path] = NO_TAIL, **engine_overrides: Any
) -> GuardEngine:
    """An engine of the base that has a rule's LoRA in it. It serves this rule and a `tail`: other
    rules' LoRAs, by name, each as its difference to the merged one.

    `engine_overrides` are vLLM EngineArgs. Raises GuardError if `folder` is no merged checkpoint of
    the recipe's base and of the adapter beside it, one of the tail is no LoRA of this base, or vLLM
    cannot start.
    """
    card, adapter = _card(recipe, folder)
    engine = {key: value for key, value in recipe.engine.items() if "lora" not in key}
    lora: dict[str, Any] = {"enable_lora": False}
    if tail:
        engine, lora = recipe.engine, {}
    base = {"base": str(folder.resolve()), "revision": None, "engine": engine}
    merged = recipe.model_copy(update=base)
    differences: dict[str, Path] = {}
    for rule, other in tail.items():
        own = _mergeable_card(recipe, other)
        versions = f"{rule}-{own.version[:16]}-{card.version[:16]}"
        difference = differences[rule] = folder.with_name(TAIL) / versions
        if not (difference / CARD).is_file():
            write_sum({other: 1, adapter: -1}, difference)
            of_merged: dict[str, Any] = {"base": merged.base, "base_revision": card.merged_revision}
            of_merged |= {"merged_revision": card.merged_revision}
            of_merged |= {"files": file_digests(difference, own.method)}
            own.model_copy(update=of_merged).save(difference)
        largest = max(peft_config(difference)["r"], lora.get("max_lora_rank", RANKS[0]))
        lora["max_lora_rank"] = min(size for size in RANKS if size >= largest)
    return GuardEngine(merged, differences, merged=card, **lora, **engine_overrides)


def _mergeable_card(recipe: Recipe, adapter: Path) -> Card:
    """The adapter's card. Raises GuardError for weights that do not act on the whole prompt, and
    for an adapter of another base.
    """
    card = load_card(adapter)
    method = METHODS[card.method]
    if method.acts_from in UNMERGEABLE:
        problem = (
            f"weights of method {method.label} cannot be merged, nor served beside merged ones"
        )
        problem += f": {UNMERGEABLE[method.acts_from]}"
        remedy = f"Take the rule's {mergeable_method(recipe)}, or serve this one as it is"
        raise GuardError(problem, where=adapter, remedy=remedy)
    Requirements.of(recipe).admit(card.rule, adapter)
    return card


def _card(recipe: Recipe, folder: Path) -> tuple[Card, Path]:
    """The checkpoint's card, with the adapter's current threshold, and the adapter's folder. Raises
    GuardError if it is not the recipe's base with the adapter beside it, or not as it was written.
    """
    try:
        merged = read_card(folder)
    except GuardError as error:
        problem, remedy = f"no merged checkpoint: {error.problem}", "Run `make merge RULE=…`"
        raise GuardError(problem, where=folder, got=error.got, remedy=remedy) from error
    again = f"Run `make merge RULE={merged.rule} MODEL={recipe.name}`"
    revision = folder_digest(folder, str(folder))
    if revision != merged.merged_revision:
        problem = "the merged checkpoint is not the one that was written"
        raise GuardError(problem, where=folder, got=revision[:12], remedy=again)
    champions = Registry(Runs(folder.parents[2])).champions(recipe.name, merged.method)
    adapter = champions.get(merged.rule, folder.with_name(merged.method))
    card = merged
    if (adapter / CARD).is_file():  # which may have a newer threshold for the same weights
        card = load_card(adapter).model_copy(update={"merged_revision": revision})
    if card.files != merged.files:
        problem = f"the rule's {METHODS[card.method].label} was trained again since it was merged"
        raise GuardError(problem, where=folder, remedy=again)
    if (card.base, card.base_revision) != (recipe.base, recipe.base_revision):
        got = f"{card.base} {card.base_revision[:12]}"
        raise GuardError("merged into another base", where=folder, got=got, remedy=again)
    # With the tokenizer of the checkpoint.
    prompts = PromptBuilder.from_base(str(folder), answer_prefix=recipe.answer_prefix)
    check_code(card, prompts, folder, f"`{card.retrain}`, then {again}")
    return card, adapter


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m serve.merge", description="Fold a rule's LoRA into the base's weights."
    )
    add = parser.add_argument
    add("--rule", required=True, help="a rule with a trained LoRA")
    add("--model", default="tiny", help="a base model of recipes/models (default: %(default)s)")
    add(
        "--runs",
        type=Path,
        default=Runs().root,
        help="where the adapters are (default: %(default)s)",
    )
    return parser.parse_args()


@exits_cleanly
def main() -> None:
    """Merge, then say how to serve it."""
    arguments = _arguments()
    recipe = load_recipe(arguments.model)
    runs = Runs(arguments.runs)
    adapter = mergeable_adapter(recipe, runs, arguments.rule)
    folder = runs.adapter(recipe.name, read_card(adapter).rule, MERGED)
    merge(recipe, adapter, folder)
    print(
        f"written: {folder}\n"
        f"to serve it: `make up RULE={folder.parent.name} MODEL={recipe.name} MERGED=1`, "
        "or any server of checkpoints"
    )


if __name__ == "__main__":
    main()
