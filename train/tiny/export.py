"""Write the distilled student as a checkpoint with its provenance and its model card. Knows nothing
of training.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config

from data.generator.library import load_background, load_phrasebook
from data.generator.phrasebook import cores_of
from guard.layout import fingerprint
from guard.rule import load_rule
from train.tiny.distil import Distilled
from train.tiny.lessons.corpus import Source
from train.tiny.model_card import model_card
from train.tiny.student import digest_of
from train.tiny.teacher import LICENCE, NAME
from train.tiny.vocabulary import vocabulary_of


def export(
    distilled: Distilled,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    *,
    sources: Sequence[Source],
    peak_lr: float,
    probe: Path,
    rules: Sequence[str] = (),
    note: str = "",
    base: Path | None = None,
) -> None:
    """A bfloat16 checkpoint that transformers and vLLM load, `provenance.json` and, made from it,
    the model card `README.md`.

    `probe` is what `train.tiny.probe` wrote, if it did; figures of other weights are left out.
    `rules`: whose phrase books it was trained on. `base`: the checkpoint that it goes on from,
    whose steps and note are kept. `note` is what else a reader of the card must know of the run.
    """
    before = json.loads((base / "provenance.json").read_text(encoding="utf-8")) if base else {}
    model = distilled.student.model
    provenance = {
        "teacher": {"name": NAME, "licence": LICENCE},
        "corpora": [
            {
                "name": source.name,
                "origins": source.origins,
                "conversations": len(source.conversations),
                "licences": source.licences,
                "digest": source.digest,
            }
            for source in sources
        ],
        "rules": list(rules),
        "phrasings": phrasings_of(rules),
        "steps": distilled.steps + before.get("steps", 0),
        "peak_learning_rate": peak_lr,
        "notes": [*before.get("notes", []), *([note] if note else [])],
        "running_means_at_the_end": {
            name: round(value, 4) for name, value in distilled.figures.items()
        },
        "shape": shape_of(model.config),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    } | ({"joint": before["joint"]} if "joint" in before else {})
    _write(folder, model, tokenizer, provenance, probe)


def export_joint(
    model: PreTrainedModel, base: Path, folder: Path, joint: dict[str, Any], probe: Path
) -> None:
    """The checkpoint in `base` with the weights of `model`, which were trained together with
    adapters as `joint` tells.
    """
    before = json.loads((base / "provenance.json").read_text(encoding="utf-8"))
    before.pop("zero_shot", None)  # of other weights
    phrasings = before.get("phrasings", {}) | phrasings_of(joint["rules"])
    _write(
        folder,
        model,
        vocabulary_of(base).tokenizer,
        before | {"joint": joint, "phrasings": phrasings},
        probe,
    )


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
    (folder / "provenance.json").write_text(
        json.dumps(provenance, indent=2) + "\n", encoding="utf-8"
    )
    (folder / "README.md").write_text(model_card(provenance), encoding="utf-8")


def phrasings_of(rules: Sequence[str]) -> dict[str, str]:
    """For each of these rules what stands for the phrasings that training sees: other ones were
    unseen by a base made with them.
    """
    background = load_background()
    found = {}
    for name in rules:
        book = load_phrasebook(load_rule(name), background)
        found[name] = fingerprint(
            [sorted(cores_of(act.cores, "seen")) for _, act in sorted(book.acts.items())]
        )[:16]
    return found


def shape_of(config: Qwen3Config) -> dict[str, int]:
    """What of a Qwen3 configuration the card tells."""
    names = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    return {
        name: getattr(config, name) for name in (*names, "vocab_size", "max_position_embeddings")
    }


def _probe_of(sha256: str, probe: Path) -> dict[str, Any]:
    """The figures in `probe` by file, if they are of these weights."""
    content = json.loads(probe.read_text(encoding="utf-8")) if probe.is_file() else {}
    return content["files"] if content.get("weights_sha256") == sha256 else {}
