"""The folder of a trained reader: its files and its card. Knows nothing of training."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from peft import LoraConfig
from safetensors.numpy import save_file
from safetensors.torch import load_file
from safetensors.torch import save_file as save_torch_file
from sklearn.metrics import roc_auc_score

from guard.calibrate import calibrate
from guard.conversation.example import SPLITS, Example, Split
from guard.layout import fingerprint
from guard.machine.provenance import versions
from guard.method import HEAD, PEFT_WEIGHTS
from guard.prompt.decoder import PromptBuilder
from guard.recipe import Recipe
from guard.weights.card import READER_RULE, Card, file_digests
from guard.weights.head import Head
from guard.weights.version_zero import identity_of
from train.adapter.trained import save_adapter
from train.calibration.coverage import coverage
from train.calibration.validation import validation_metrics
from train.reader.rows import TokenUnit
from train.reader.trainer import ReaderInTraining

METHOD = "alora"
TEXT = "Any rule, as its words say."
Units = Mapping[Split, list[TokenUnit]]
Answers = tuple[list[float], list[int], list[str]]  # logits, labels, sources


def export(
    reader: ReaderInTraining,
    recipe: Recipe,
    builder: PromptBuilder,
    files: Sequence[Path],
    units: Units,
    folder: Path,
) -> Card:
    """Write the reader into `folder`, whole or not at all, calibrated and tested as it is kept.
    `files` are those of its `units`.
    """
    reader.round()
    answers = {split: reader.answers(units[split]) for split in SPLITS[1:]}
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    _save(reader, recipe, part)
    card = _card(recipe, builder, part, files, units, answers)
    card.save(part)
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
    return card


def adapter_config(recipe: Recipe, builder: PromptBuilder) -> LoraConfig:
    """That of the recipe's aLoRA, without dropout: each row is seen once."""
    settings = recipe.settings(METHOD).lora | {"lora_dropout": 0.0}
    invocation = list(builder.invocation(TEXT))
    return LoraConfig(**settings, task_type="CAUSAL_LM", alora_invocation_tokens=invocation)


def _save(reader: ReaderInTraining, recipe: Recipe, folder: Path) -> None:
    """PEFT's two files, the weights in bfloat16, and the head's."""
    reader.stacked.take_out()
    save_adapter(reader.stacked.as_peft(0, reader.model), recipe, folder)
    weights = load_file(folder / PEFT_WEIGHTS)
    halved = {name: weight.bfloat16() for name, weight in weights.items()}
    save_torch_file(halved, folder / PEFT_WEIGHTS, {"format": "pt"})
    head = Head(reader.weight.detach().cpu().numpy(), float(reader.bias.detach()))
    save_file(dict(head.tensors()), folder / HEAD)


def _card(
    recipe: Recipe,
    builder: PromptBuilder,
    folder: Path,
    files: Sequence[Path],
    units: Units,
    answers: Mapping[Split, Answers],
) -> Card:
    logits, labels, _ = answers["validation"]
    calibration = calibrate(logits, labels)
    train, validation = _examples(units["train"]), _examples(units["validation"])
    return Card(
        **identity_of(recipe, builder, METHOD, READER_RULE, TEXT),
        data_hash=fingerprint(*files),
        test_sha256=fingerprint(files[2]),
        seed=0,
        recipe=recipe.training_settings(METHOD),
        versions=versions(),
        metrics={
            "validation": validation_metrics(logits, labels, calibration),
            "held_out": _aurocs(answers["test"]),
        },
        **vars(replace(calibration, coverage=coverage(train, validation, logits, [], []))),
        max_fpr=None,
        files=file_digests(folder, METHOD),
    )


def _aurocs(answers: Answers) -> dict[str, Any]:
    """The AUROC over all rows, and of each source that has both labels."""
    rows = list(zip(*answers, strict=True))
    aurocs: dict[str, Any] = {"n": len(rows)}
    for name in ("all", *sorted({source for _, _, source in rows})):
        chosen = [(logit, label) for logit, label, source in rows if name in ("all", source)]
        labels = [label for _, label in chosen]
        if len(set(labels)) == 2:
            auroc = roc_auc_score(labels, [logit for logit, _ in chosen])
            aurocs[name] = round(float(auroc), 4)
    return aurocs


def _examples(units: Sequence[TokenUnit]) -> list[Example]:
    """A row for each label."""
    examples: list[Example] = []
    for unit in sorted(units, key=lambda unit: unit.longest):
        for place, label in zip(unit.stands_on, unit.labels, strict=True):
            messages = unit.conversations[place]
            examples.append(Example("", READER_RULE, messages, label, "train", unit.source, ""))
    return examples
