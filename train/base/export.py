"""Write the distilled student as a checkpoint with its model card. Knows nothing of training."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3ForCausalLM

from train.base.corpus import Source
from train.base.teacher import LICENCE, NAME


def export(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path, *, sources: Sequence[Source], steps: int) -> None:
    """A bfloat16 checkpoint that transformers and vLLM load, and `provenance.json` with teacher, corpora, licences and hashes."""
    model.generation_config = GenerationConfig.from_model_config(model.config)
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = folder / "model.safetensors"
    weights.chmod(0o644)
    provenance = {
        "teacher": {"name": NAME, "licence": LICENCE},
        "corpora": [
            {"name": source.name, "conversations": len(source.conversations), "licences": source.licences, "sha256": source.sha256}
            for source in sources
        ],
        "steps": steps,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "weights_sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
    }
    (folder / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n")
