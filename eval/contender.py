"""Who stands in the quality table: the baselines and the methods, by name.

In a table of several bases a name starts with the base: `lora` there is `minilm/lora`.
"""

from __future__ import annotations

from guard.method import METHODS

JUDGE = "judge"
BAG_OF_WORDS = "bag_of_words"
BASELINES = {JUDGE: "judge", BAG_OF_WORDS: "bag of words"}  # not trained by us


def on_base(model: str, name: str) -> str:
    return f"{model}/{name}"


def is_baseline(contender: str) -> bool:
    return _split(contender)[1] in BASELINES


def is_seeded(contender: str) -> bool:
    return METHODS[_split(contender)[1]].is_seeded


def label_of(contender: str) -> str:
    model, name = _split(contender)
    label = BASELINES.get(name) or METHODS[name].label
    return f"{model} {label}".strip()


def _split(contender: str) -> tuple[str, str]:
    model, _, name = contender.rpartition("/")
    return model, name
