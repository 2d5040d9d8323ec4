from __future__ import annotations

import pytest

from data.manifest import describe, save
from eval.words import words_alone
from guard.errors import GuardError
from guard.example import Example, Message, write_examples
from tests.eval.conftest import World


def test_the_best_of_the_word_classifiers_is_read_by_stratum(world: World) -> None:
    world.add_rule()
    world.add_manifest(
        "medical", {"seen": {"naive_bayes": 0.9, "best": 0.95}, "unseen": {"best": 0.7}}
    )
    assert words_alone(world.runs.data("medical")) == {"seen": 0.95, "unseen": 0.7}


def test_a_manifest_is_read_as_the_data_stage_writes_it(world: World) -> None:
    folder = world.runs.data("medical")
    said = ["take two tablets", "ask a doctor"]
    examples = {
        split: [
            Example(
                f"{split}{n}",
                "medical",
                (Message("assistant", said[n % 2]),),
                1 - n % 2,
                split,
                "toy",
                f"{split}{n}",
            )
            for n in range(8)
        ]
        for split in ("train", "validation", "test")
    }
    sha256 = {
        split: write_examples(folder / f"{split}.jsonl", rows) for split, rows in examples.items()
    }
    save(folder, {"sha256": sha256} | describe([row for rows in examples.values() for row in rows]))
    assert list(words_alone(folder).values()) == [1.0]


def test_without_a_manifest_of_these_data_nothing_is_known(world: World) -> None:
    world.add_rule()
    folder = world.runs.data("medical")
    assert words_alone(folder) == {}
    world.add_manifest("medical", {})
    assert words_alone(folder) == {}
    world.add_manifest("medical", {"seen": {"best": 0.95}})
    (folder / "test.jsonl").write_text("")
    assert words_alone(folder) == {}


@pytest.mark.parametrize("content", ["", "[]", '{"sha256": {}}', '{"sha2'])
def test_a_manifest_that_cannot_be_read_says_what_to_do(content: str, world: World) -> None:
    world.add_rule()
    world.add_manifest("medical", {}).write_text(content)
    with pytest.raises(
        GuardError, match=r"manifest\.json: not a manifest of data.*make data RULE=medical FORCE=1"
    ):
        words_alone(world.runs.data("medical"))
