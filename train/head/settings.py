"""The settings of a head's fit: those that a recipe states, and those that are tried. Knows nothing
of how heads are fitted.
"""

from __future__ import annotations

import itertools
import math

from guard.errors import GuardError, did_you_mean
from guard.prompt.ngrams import NgramVocabulary
from train.job import Job

STRENGTH = "C"  # a key of a recipe's `head`: scikit-learn's inverse of the regularisation
STRENGTHS = (0.1, 1.0, 10.0, 100.0)  # unless the recipe states one, from the strongest on
WORD_SCALES = (1.0, 3.0)  # what TF-IDF is multiplied by beside the states


def check_head(job: Job) -> None:
    """Raise GuardError for settings that a head does not read."""
    for key in ("lora", "trainer", "early_stopping_patience", "min_steps"):
        if getattr(job.settings, key):
            problem = f"a head does not use {key} settings"
            raise GuardError(problem, where=job.where(key), remedy="Remove them")
    where = job.where("head")
    for key, value in job.settings.head.items():
        if key != STRENGTH:
            remedy = did_you_mean(key, [STRENGTH]) or f"Only {STRENGTH} can be set"
            raise GuardError(f"unknown key '{key}' of a head", where=where, remedy=remedy)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise GuardError(
                f"{STRENGTH} must be a positive number",
                where=where,
                got=value,
                remedy="Name a number above 0, or leave it out: then the validation rows choose",
            )


def settings_to_try(job: Job, vocabulary: NgramVocabulary) -> list[tuple[float, float]]:
    """The pairs of word scale and C to try."""
    scales = WORD_SCALES if vocabulary.keys.size else WORD_SCALES[:1]
    stated = job.settings.head.get(STRENGTH)
    strengths = STRENGTHS if stated is None else (stated,)
    return list(itertools.product(scales, strengths))
