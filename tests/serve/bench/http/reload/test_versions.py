"""Which weights gave an answer, and how a version takes the place of another."""

from __future__ import annotations

from pathlib import Path

import pytest

from guard.method import PEFT_WEIGHTS
from guard.weights.card import load_card
from serve.bench.http.reload.versions import ServedSpans, outcome, put_in_place
from tests.serve.cards import save_card

VERSION_LOGITS = [-2.0, 2.0, 0.1, 0.2]


@pytest.mark.parametrize(
    ("logit", "served", "expected"),
    [
        (2.0, {1}, "right"),
        (2.04, {0, 1}, "right"),
        (2.0, {0}, "wrong_version"),
        (1.0, {0, 1, 2, 3}, "no_version"),
        (0.1, {2}, "told_nothing"),
        (0.1, {2, 3}, "right"),
    ],
)
def test_a_logit_tells_by_which_weights_it_was_given(
    logit: float, served: set[int], expected: str
) -> None:
    assert outcome(logit, VERSION_LOGITS, served) == expected


def test_both_versions_may_answer_while_one_replaces_the_other() -> None:
    served = ServedSpans()
    served.start(0)
    (_, before, _) = served.spans[0]
    served.start(1)
    (_, since, _) = served.spans[1]
    assert served.between(before, since) == {0, 1}
    served.end_previous()
    until = served.spans[0][2]
    assert served.between(until + 1, until + 2) == {1}
    assert served.between(before, until + 2) == {0, 1}
    assert served.between(before - 2, before - 1) == set()


def test_a_version_takes_the_place_of_another(tmp_path: Path) -> None:
    version, folder = tmp_path / "versions" / "first", tmp_path / "rule" / "alora"
    for made in (version, folder):
        made.mkdir(parents=True)
        (made / PEFT_WEIGHTS).write_text(made.name)
        save_card(made, made.parent.name)
    put_in_place(version, folder)
    assert (folder / PEFT_WEIGHTS).read_text() == "first"
    assert load_card(folder).rule == "rule" and list(folder.parent.iterdir()) == [folder]
