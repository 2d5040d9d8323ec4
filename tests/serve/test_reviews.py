"""From a check to a training row: kept, labelled by two, exported, and built into data."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import serve.reviews
from data import manifest
from data.build import build
from data.generator.generate import Counts
from data.sources import DataRequest
from guard.conversation.example import GENERATOR, Example, read_examples
from guard.errors import GuardError
from guard.layout import Runs, split_files
from guard.rule import load_rule
from serve.api.app import create_app
from serve.registry.reviews import KEY, Label
from tests.data.own_rows import in_splits, random_rows, written
from tests.serve.review_store import checked, new_key, of, opened
from tests.serve.serving import serving
from tests.serve.toy_engine import ToyEngine
from tests.waiting import wait_until

RULE = load_rule("refund_promise")
SMALL = Counts(train=16, validation=8, test=8)
TURNS = 40  # conversations, each of words of its own


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, new_key())


def run(monkeypatch: pytest.MonkeyPatch, root: Path, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["reviews", "--runs", str(root), *arguments])
    serve.reviews.main()


def built(root: Path, source: str) -> dict[str, list[Example]]:
    """The reviewed rows of what is built of the source, by split."""
    folder = Runs(root).data(RULE.id)
    build(DataRequest(RULE, source, SMALL, 0, "keep", folder))
    reviewed: dict[str, list[Example]] = {}
    for file in split_files(folder):
        reviewed[file.stem] = [row for row in read_examples(file) if row.source == "reviews"]
    return reviewed


@pytest.mark.slow
def test_labelled_checks_are_training_and_validation_rows_and_never_test_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    texts: list[str] = [row["text"] for row in random_rows(TURNS)]
    engine = ToyEngine({RULE.id: -2.0})
    with serving(create_app(engine, review_store=store)) as client:
        for number, text in enumerate(texts):
            for turns in (1, 2):  # two requests of one conversation
                messages: list[Any] = [{"role": "user", "content": text}] * turns
                headers = {"x-request-id": f"{number}.{turns}"}
                client.post("/v1/check", json={"messages": messages}, headers=headers)
                wait_until(lambda: store.progress())
        wait_until(lambda: store.progress()[0].waiting == 2 * TURNS)
        for number in range(TURNS):
            vote = {"rule": RULE.id, "label": ("allow", "violation")[number % 2]}
            for turns, reviewer in ((1, "ann"), (1, "bob"), (2, "ann"), (2, "bob")):
                name = {"request_id": f"{number}.{turns}", "reviewer": reviewer}
                assert client.post("/v1/feedback", json=vote | name).status_code == 200
        waiting = {"request_id": "0.1", "rule": RULE.id, "label": "violation", "reviewer": "eve"}
        client.post("/v1/feedback", json=waiting)  # now it is disputed
    run(monkeypatch, tmp_path, "--export", RULE.id)
    assert Runs(tmp_path).reviews(RULE.id).stat().st_mode & 0o077 == 0
    own = written(tmp_path / "own.jsonl", in_splits(random_rows()))
    for source, is_copied in ((GENERATOR, False), (f"{GENERATOR}+{own}", True)):
        rows = built(tmp_path, f"{source}+reviews")
        assert rows["test"] == []
        if is_copied:  # the file has the same texts
            assert rows["train"] == rows["validation"] == []
            counts = {"rows": 0, "repeated": 2 * TURNS - 1}
            assert manifest.load(Runs(tmp_path).data(RULE.id))["reviews"] == counts
            continue
        assert len(rows["train"]) + len(rows["validation"]) == 2 * TURNS - 1
        assert len(rows["train"]) > len(rows["validation"]) > 0
        split_of = {row.group: split for split, found in rows.items() for row in found}
        for split, found in rows.items():
            assert {split_of[row.group] for row in found} <= {split}
            for row in found:
                assert row.label == texts.index(row.messages[0].content) % 2
        sizes = Counter(row.group for row in (*rows["train"], *rows["validation"]))
        assert set(sizes.values()) == {1, 2}


def settle(root: Path, name: str, text: str, label: Label) -> None:
    store = opened(root)
    store.keep(checked(name, text=text))
    for reviewer in ("ann", "bob"):
        store.vote(of(name, reviewer, RULE.id), label)


def test_equal_conversations_are_one_row_unless_their_labels_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settle(tmp_path, "a", "twice", "allow")
    settle(tmp_path, "b", "twice", "allow")
    settle(tmp_path, "c", "contradictory", "allow")
    settle(tmp_path, "d", "contradictory", "violation")
    monkeypatch.setenv(KEY, new_key())
    settle(tmp_path, "e", "of the second key", "violation")
    run(monkeypatch, tmp_path, "--export", RULE.id)
    assert "1 reviewed rows, left out: 0 contradictory, 4 of another key" in capsys.readouterr().out
    run(monkeypatch, tmp_path)
    assert f"{RULE.id:<24}         0          2      3         0" in capsys.readouterr().out
    monkeypatch.setenv(KEY, new_key())
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path, "--export", RULE.id)
    assert "another key encrypted all" in capsys.readouterr().err
    lines = Runs(tmp_path).reviews(RULE.id).read_text().splitlines()  # as they were
    assert [json.loads(line)["label"] for line in lines] == [1]


def test_without_a_key_a_store_or_an_export_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path)
    assert "make up REVIEWS=policy.yaml" in capsys.readouterr().err
    opened(tmp_path)
    monkeypatch.delenv(KEY)
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path, "--export", RULE.id)
    assert f"{KEY} is not set" in capsys.readouterr().err
    with pytest.raises(GuardError, match=r"DATA=\.\.\.\+reviews. writes it"):
        built(tmp_path, "generator+reviews")


def test_reviewed_rows_of_a_group_that_is_in_the_data_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after somebody has copied an earlier export, to keep it."""
    settle(tmp_path, "a", "a conversation like no other", "allow")
    run(monkeypatch, tmp_path, "--export", RULE.id)
    (line,) = Runs(tmp_path).reviews(RULE.id).read_text().splitlines()
    own = written(tmp_path / "own.jsonl", [*random_rows(), json.loads(line)])
    assert built(tmp_path, f"{own}+reviews") == {"train": [], "validation": [], "test": []}
