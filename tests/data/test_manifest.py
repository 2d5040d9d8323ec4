import json
from typing import Any

from data.generator.generate import Counts, generate
from data.generator.library import load_corpus
from data.manifest import describe, table
from guard.conversation.example import Example
from guard.rule import load_rule
from tests.data.random_words import rows_of_random_words


def _described(examples: list[Example]) -> dict[str, Any]:
    return json.loads(json.dumps(describe(examples)))  # type: ignore[no-any-return]


def test_the_closest_pair_across_splits_is_reported() -> None:
    rows = rows_of_random_words(telling=False)
    copy = Example("copy", "r", rows[0].messages, 0, "test", "s", "other", {"stratum": "real"})
    assert _described(rows)["duplicates"]["highest_similarity_across_splits"] < 0.7
    duplicates = _described([*rows, copy])["duplicates"]
    assert duplicates["highest_similarity_across_splits"] == 1.0
    assert duplicates["pairs_across_splits"]["0.7"] == 1


def test_a_generated_set_is_described_per_split_stratum_act_and_dimension() -> None:
    rule = load_rule("medical_advice")
    examples = generate(load_corpus(rule, [rule, load_rule("pii_leak")]), Counts(80, 8, 40), seed=0)
    manifest = _described(examples)
    assert [tuple(row.values()) for row in manifest["counts"]] == [
        ("train", "seen", 80, 40),
        ("validation", "seen", 4, 2),
        ("validation", "unseen", 4, 2),
        ("test", "seen", 20, 10),
        ("test", "unseen", 20, 10),
    ]
    assert sum(manifest["dimensions"]["severity"].values()) == 128
    assert manifest["phrasings_per_act"]["diagnose"]["train"] >= 8
    assert manifest["phrasings_per_act"]["diagnose"]["cores_unseen"] >= 1
    assert manifest["duplicates"]["pairs_across_splits"]["0.7"] == 0
    assert manifest["duplicates"]["highest_similarity_across_splits"] < 0.7
    assert (
        0
        < manifest["distinct_ngrams"]["train"]["distinct_1"]
        < manifest["distinct_ngrams"]["train"]["distinct_3"]
        <= 1
    )
    assert set(manifest["auroc_from_surface"]["words"]) == {"seen", "unseen"}
    origin = {"source": "generator", "seed": 0, "dropped": 0}
    assert "unseen" in table("medical_advice", origin | manifest)
    header = "  split       stratum    rows  violate surface words"
    assert table("medical_advice", origin | manifest).splitlines()[1] == header
    assert "dropped" not in table("medical_advice", origin | manifest)
    near = (
        "  near duplicates across splits (similarity 0.7 or more): 0.0 %, any would be refused; "
        "closest pair: 0."
    )
    for phrasings in (manifest["phrasings_per_act"], {}):  # of generated rows, and of others
        assert near in table("medical_advice", origin | manifest | {"phrasings_per_act": phrasings})
    assert "  3 rows dropped: their group or nearly their text is" in table(
        "medical_advice", {**origin, **manifest, "dropped": 3}
    )
