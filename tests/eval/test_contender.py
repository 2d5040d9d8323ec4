from __future__ import annotations

import pytest

from eval.contender import is_baseline, label_of, on_base


@pytest.mark.parametrize(
    ("contender", "label", "baseline"),
    [
        ("lora", "LoRA", False),
        ("bag_of_words", "bag of words", True),
        (on_base("minilm", "lora"), "minilm LoRA", False),
        (on_base("tiny", "judge"), "tiny judge", True),
    ],
)
def test_a_contender_carries_its_base_s_name(contender: str, label: str, baseline: bool) -> None:
    assert label_of(contender) == label
    assert is_baseline(contender) is baseline
