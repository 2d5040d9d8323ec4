"""A rule that has changed what its labels follow from is noticed before training and evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from guard.conversation.labelling import MANIFEST_KEY, check_labelling, labelling
from guard.errors import GuardError
from guard.rule import load_rule

RULE = load_rule("medical_advice")


def test_rows_of_another_speaker_are_refused_and_another_wording_is_none_of_it(
    tmp_path: Path,
) -> None:
    check_labelling(tmp_path, RULE)
    (tmp_path / "manifest.json").write_text(json.dumps({MANIFEST_KEY: labelling(RULE)}))
    check_labelling(tmp_path, RULE.model_copy(update={"title": "No advice.", "max_fpr": 0.01}))
    changed = RULE.model_copy(update={"judged": "user", "turns": "last"})
    problem = r'made for judged: "assistant", turns: "any"; .* judged: "user", turns: "last"'
    with pytest.raises(GuardError, match=rf"{problem}.*make data RULE=medical_advice"):
        check_labelling(tmp_path, changed)


@pytest.mark.parametrize("content", ['{"labelling": ', "[]"])
def test_a_manifest_that_cannot_be_read_says_how_to_make_it_again(
    tmp_path: Path, content: str
) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(GuardError, match=r"manifest.json.*make data RULE=medical_advice FORCE=1"):
        check_labelling(tmp_path, RULE)
