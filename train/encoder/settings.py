"""Checks the settings of a method on an encoder, and the encoder. Knows nothing of training."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, cast

from transformers import AutoModelForTokenClassification
from transformers.utils.hub import cached_file

from guard.errors import GuardError
from guard.files.strict_json import load_json
from guard.recipe import Recipe
from train.adapter.load import check_modules, checked_settings
from train.encoder.bases import token_classifier_config
from train.head.fit import check_head as check_head_settings
from train.job import Job

# Types of transformers whose first token is at the position behind that of the padding token.
POSITIONS_BEHIND_PADDING = ("roberta", "xlm-roberta")
# Where vLLM looks, in this order, for how much of its positions a base is read in.
SENTENCE_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)


def check_adapter(job: Job) -> None:
    """Construct the job's settings, and put its fresh adapter on its base without weights. Raises
    GuardError for settings that PEFT or the trainer would refuse, for modules that the base does
    not have, and for a base that is not served or in such windows.
    """
    adapter, _ = checked_settings(job)
    config = _checked_config(job.recipe)
    check_modules(job, adapter, config, AutoModelForTokenClassification.from_config)


def check_head(job: Job) -> None:
    """Raise GuardError for settings that a head does not read, and for a base that is not served or
    in such windows.
    """
    check_head_settings(job)
    _checked_config(job.recipe)


def _checked_config(recipe: Recipe) -> Any:
    """The base's configuration. Raises GuardError for a type or a window that is not served."""
    config = token_classifier_config(recipe)
    recipe.check_model_type(config)
    usable = _usable_positions(recipe, config)
    window = recipe.window_tokens
    if window is None or window > usable:
        problem = "the encoder has fewer positions than a window has tokens"
        where = f"recipe {recipe.name}: window_tokens"
        got = window
        remedy = f"At most {usable}"
        raise GuardError(problem, where=where, got=got, remedy=remedy)
    return config


def _usable_positions(recipe: Recipe, config: Any) -> int:
    """How many tokens the base reads at once, in training and in vLLM."""
    positions: int = config.max_position_embeddings
    if config.model_type in POSITIONS_BEHIND_PADDING:
        positions -= config.pad_token_id + 1
    stated = _sentence_length(recipe.base_path, recipe.commit)
    return positions if stated is None else min(positions, stated)


@functools.cache
def _sentence_length(base: str, revision: str | None) -> int | None:
    """How many tokens the base reads as a sentence encoder, beyond which vLLM refuses to read; None
    for one that is none.
    """
    for name in SENTENCE_FILES:
        path = cached_file(
            base,
            name,
            revision=revision,
            local_files_only=Path(base).is_dir(),
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,  # a cached base needs no network
        )
        if path is None:
            continue
        content = load_json(Path(path), remedy="Correct it, or download the base again")
        if content:
            return cast(int | None, content.get("max_seq_length"))
    return None
