"""Write the distilled student as a checkpoint with its provenance and its model card. Knows nothing
of training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config

from data.generator.library import load_background, load_phrasebook
from data.generator.phrasebook import cores_of
from guard.layout import fingerprint
from guard.rule import load_rule
from train.tiny.distil import Distilled
from train.tiny.lessons.corpus import CorpusSource
from train.tiny.model_card import model_card
from train.tiny.student import digest_of
from train.tiny.teacher import LICENCE, NAME
from train.tiny.vocabulary import vocabulary_of

PROVENANCE = "provenance.json"
SHAPE_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)


@dataclass(frozen=True)
class TrainingRecord:
    """What the card tells of a run.

    `phrasings`: of the rules whose phrase books it was trained on, as `phrasings_of` gave them when
    it began. `base`: the checkpoint that it goes on from, whose steps, notes and phrasings are
    kept. `note`: what else a reader must know.
    """

    sources: Sequence[CorpusSource]
    peak_lr: float
    phrasings: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    base: Path | None = None


def export(
    distilled: Distilled,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    record: TrainingRecord,
    probe: Path,
) -> None:
    """A bfloat16 checkpoint that transformers and vLLM load, `provenance.json` and, made from it,
    the model card `README.md`.

    `probe` is what `train.tiny.probe` wrote, if it did; figures of other weights are left out.
    """
    model = distilled.student.model
    before: dict[str, Any] = {}
    if record.base:
        before = _provenance_of(record.base)
    notes = [*before.get("notes", []), record.note]
    figures = distilled.figures.items()
    provenance = {
        "teacher": {"name": NAME, "licence": LICENCE},
        "corpora": [_described(source) for source in record.sources],
        "rules": list(record.phrasings),
        "phrasings": _all_phrasings(before, record.phrasings),
        "steps": distilled.steps + before.get("steps", 0),
        "peak_learning_rate": record.peak_lr,
        "notes": [note for note in notes if note],
        "running_means_at_the_end": {name: round(value, 4) for name, value in figures},
        "shape": shape_of(model.config),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
    if "joint" in before:
        provenance["joint"] = before["joint"]
    _write(folder, model, tokenizer, provenance, probe)


def export_joint(
    model: PreTrainedModel,
    base: Path,
    folder: Path,
    joint: dict[str, Any],
    phrasings: Mapping[str, str],
    probe: Path,
) -> None:
    """The checkpoint in `base` with the weights of `model`, which were trained together with
    adapters as `joint` tells, on rows of these `phrasings`.
    """
    provenance = _provenance_of(base)
    provenance.pop("zero_shot", None)  # measured on other weights
    provenance["joint"] = joint
    provenance["phrasings"] = _all_phrasings(provenance, phrasings)
    _write(folder, model, vocabulary_of(base).tokenizer, provenance, probe)


def _provenance_of(base: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((base / PROVENANCE).read_text(encoding="utf-8"))
    return content


def _all_phrasings(before: dict[str, Any], phrasings: Mapping[str, str]) -> dict[str, str]:
    """Those of an earlier base with the new ones. A rule whose phrase book has changed in between
    gets a digest of both, which is that of no phrase book: what either shows was seen.
    """
    merged: dict[str, str] = dict(before.get("phrasings", {}))
    for rule, digest in phrasings.items():
        earlier = merged.get(rule, digest)
        merged[rule] = digest if digest == earlier else fingerprint(earlier, digest)[:16]
    return merged


def _described(source: CorpusSource) -> dict[str, Any]:
    return {
        "name": source.name,
        "origins": source.origins,
        "conversations": len(source.conversations),
        "licences": source.licences,
        "digest": source.digest,
    }


def _write(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    provenance: dict[str, Any],
    probe: Path,
) -> None:
    model.generation_config = GenerationConfig.from_model_config(model.config)
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    sha256 = digest_of(folder)
    provenance |= {"weights_sha256": sha256, "linear_probe": _probe_of(sha256, probe)}
    text = json.dumps(provenance, indent=2) + "\n"
    (folder / PROVENANCE).write_text(text, encoding="utf-8")
    (folder / "README.md").write_text(model_card(provenance), encoding="utf-8")


def phrasings_of(rules: Sequence[str]) -> dict[str, str]:
    """What stands for the phrasings that training sees, for each of these rules: other ones were
    unseen by a base made with them.
    """
    background = load_background()
    digests = {}
    for name in rules:
        book = load_phrasebook(load_rule(name), background)
        seen = [sorted(cores_of(act.cores, "seen")) for _, act in sorted(book.acts.items())]
        digests[name] = fingerprint(seen)[:16]
    return digests


def shape_of(config: Qwen3Config) -> dict[str, int]:
    """The part of a Qwen3 configuration that the card tells."""
    return {name: getattr(config, name) for name in SHAPE_FIELDS}


def _probe_of(sha256: str, probe: Path) -> dict[str, Any]:
    """The figures in `probe` by file, if they are of these weights."""
    if not probe.is_file():
        return {}
    content = json.loads(probe.read_text(encoding="utf-8"))
    if content.get("weights_sha256") != sha256:
        return {}
    files: dict[str, Any] = content["files"]
    return files
