"""Every view of a conversation earns its place, and nothing of the test split is looked at."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sklearn.feature_extraction.text import CountVectorizer

from eval.bag_of_words import (
    NGRAMS,
    STRENGTHS,
    VIEWS,
    CharacterCounts,
    fit_bag_of_words,
    measure,
    text_of,
)
from eval.bag_of_words import RuleData as Data
from eval.quality import is_right
from guard.errors import GuardError
from guard.example import SPLITS, Example, Message, Split, write_examples
from guard.layout import ROOT
from guard.rule import Judged

NOISE = [f"{first}{second}" for first, second in itertools.product("bcdfgh", "aeiou")]


def rows(
    split: Split, turns: Callable[[int, list[str]], list[Message]], n: int = 60
) -> list[Example]:
    """Rows of alternating labels; `turns` writes one from its label and some noise."""
    rng = np.random.default_rng(len(split))
    return [
        Example(
            id=f"{split}{number}",
            rule="toy",
            messages=tuple(turns(number % 2, rng.choice(NOISE, 3).tolist())),
            label=number % 2,
            split=split,
            source="toy",
            group=f"{split}{number}",
        )
        for number in range(n)
    ]


def early(label: int, noise: list[str]) -> list[Message]:
    """The user's first turn tells; the assistant, who is judged, and the last turn do not."""
    word = ("plain", "secret")[label]
    return [
        Message("user", f"{noise[0]} {word}"),
        Message("assistant", f"{noise[1]} {noise[2]}"),
        Message("user", noise[0]),
    ]


def judged(label: int, noise: list[str]) -> list[Message]:
    """The assistant's turn tells; others say the same words at random, and last."""
    word, decoy = ("plain", "secret")[label], ("plain", "secret")[noise[0] < "d"]
    return [
        Message("user", f"{decoy} {decoy} {decoy}"),
        Message("assistant", f"{noise[1]} {word}"),
        Message("user", f"{decoy} {noise[2]}"),
    ]


def last(label: int, noise: list[str]) -> list[Message]:
    """The assistant's last turn tells; his first says the same words at random."""
    word, decoy = ("plain", "secret")[label], ("plain", "secret")[noise[0] < "d"]
    return [
        Message("assistant", f"{decoy} {decoy} {decoy}"),
        Message("user", decoy),
        Message("assistant", f"{noise[1]} {word}"),
    ]


def only(label: int, noise: list[str]) -> list[Message]:
    """One turn that tells: every view is the same, and every strength is enough."""
    return [Message("assistant", ("plain", "secret")[label])]


@pytest.mark.parametrize(
    ("view", "turns"),
    [("whole conversation", early), ("judged speaker", judged), ("last turn", last)],
)
def test_the_view_that_tells_is_chosen_and_without_it_the_baseline_is_worse(
    view: str,
    turns: Callable[[int, list[str]], list[Message]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train, validation = rows("train", turns), rows("validation", turns)
    fitted = fit_bag_of_words(train, validation, "assistant")
    assert (fitted.variant.view, fitted.variant.validation_auroc) == (view, 1.0)
    test = rows("test", turns)
    assert is_right(test, fitted.answers(test)).mean() > 0.9
    monkeypatch.delitem(VIEWS, view)
    without = fit_bag_of_words(train, validation, "assistant")
    assert without.variant.validation_auroc < 1.0


def test_no_test_row_is_seen_before_everything_is_chosen() -> None:
    """Test rows that say the opposite change the figures, never the choice."""
    splits = {split: rows(split, judged) for split in SPLITS}
    opposite = rows("test", lambda label, noise: judged(1 - label, noise))
    first = measure(Data("toy", "assistant", None, splits))
    second = measure(Data("toy", "assistant", None, splits | {"test": opposite}))
    assert first.variant == second.variant
    assert (first.quality.accuracy, second.quality.accuracy) == (1.0, 0.0)


def test_the_first_of_equals_is_chosen_and_a_second_fit_is_the_same() -> None:
    train, validation = rows("train", only), rows("validation", only)
    fits = [fit_bag_of_words(train, validation, "assistant") for _ in range(2)]
    assert fits[0].variant.c == STRENGTHS[0]
    assert fits[0].variant.ngrams == next(iter(NGRAMS))
    assert fits[0].answers(validation) == fits[1].answers(validation)


@pytest.mark.parametrize("speaker", ["user", "assistant", "conversation", "tool"])
def test_a_rule_s_judged_speaker_is_who_is_read(speaker: Judged) -> None:
    (row,) = rows("test", lambda label, noise: [Message("user", "a"), Message("tool", "b")], 1)
    expected = {"user": "a", "assistant": "", "conversation": "a\nb", "tool": "b"}
    assert text_of(row, "judged speaker", speaker) == expected[speaker]
    assert text_of(row, "last turn", speaker) == "b"


def test_every_view_reads_all_the_turns_that_its_name_says() -> None:
    turns = [Message("user", "a"), Message("assistant", "b"), Message("tool", "c")]
    (row,) = rows("test", lambda label, noise: [*turns, Message("assistant", "d")], 1)
    read = {view: text_of(row, view, "assistant") for view in VIEWS}
    assert read == {"whole conversation": "a\nb\nc\nd", "judged speaker": "b\nd", "last turn": "d"}


def parts(label: int, noise: list[str]) -> list[Message]:
    """Words that occur once; their middles tell."""
    return [Message("user", f"{''.join(noise)}{('xkq', 'zvw')[label]}{noise[0]}{noise[1]}")]


def test_parts_of_words_tell_where_no_word_comes_twice() -> None:
    train, validation = rows("train", parts), rows("validation", parts)
    fitted = fit_bag_of_words(train, validation, "user")
    assert fitted.variant.ngrams == "words 1-2 and characters 2-5"
    assert fitted.variant.validation_auroc == 1.0


def test_the_strengths_reach_to_where_a_baseline_is_at_its_best() -> None:
    """C = 100 won on 12 of the 15 shipped rules, 1,000 on none: docs/log/quality.md."""
    assert min(STRENGTHS) <= 0.1 and {10.0, 100.0} < set(STRENGTHS) and max(STRENGTHS) >= 1000


def test_what_hides_text_is_undone_before_it_is_counted() -> None:
    hidden = Message("user", "d\u200bo\u200bse \uff41\uff42\uff43")
    (row,) = rows("test", lambda label, noise: [hidden], 1)
    assert text_of(row, "whole conversation", "user") == "dose abc"


def test_the_weights_are_those_of_the_variant_that_was_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The weakest strength is enough and comes first; others are fitted after it."""
    train, validation = rows("train", only), rows("validation", only)
    fitted = fit_bag_of_words(train, validation, "assistant")
    assert fitted.variant.c == STRENGTHS[0]
    monkeypatch.setattr("eval.bag_of_words.STRENGTHS", STRENGTHS[:1])
    alone = fit_bag_of_words(train, validation, "assistant")
    assert np.abs(fitted.model.coef_ - alone.model.coef_).max() < 1e-6
    assert [answer.logit for answer in fitted.answers(validation)] == pytest.approx(
        [answer.logit for answer in alone.answers(validation)], abs=1e-6
    )


def test_character_counts_are_scikit_learn_s() -> None:
    texts = ["Take two tablets  daily, not three.", "a b\ntablet", ""]
    ours, theirs = CharacterCounts(), CountVectorizer(analyzer="char_wb", ngram_range=(2, 5))
    expected = theirs.fit_transform(texts)
    assert (ours.fit_transform(texts).toarray() == expected.toarray()).all()
    assert (ours.transform(["", " "]).toarray() == theirs.transform(["", " "]).toarray()).all()
    unseen = ["Tablets, thrice", "two"]
    assert (ours.transform(unseen).toarray() == theirs.transform(unseen).toarray()).all()


def test_the_threshold_keeps_to_the_rule_s_largest_false_positive_rate() -> None:
    def mostly(label: int, noise: list[str]) -> list[Message]:
        return judged(label if noise[2][0] != "g" else 1 - label, noise)

    train, validation = rows("train", mostly, 200), rows("validation", mostly, 200)
    for max_fpr in (0.02, 0.3):
        fitted = fit_bag_of_words(train, validation, "assistant", max_fpr)
        answers = fitted.answers(validation)
        pairs = zip(answers, validation, strict=True)
        flagged = [answer.violates for answer, row in pairs if row.label == 0]
        assert sum(map(bool, flagged)) / len(flagged) <= max_fpr


def test_rows_that_nothing_can_be_fitted_on_are_refused() -> None:
    validation = rows("validation", early)
    with pytest.raises(GuardError, match=r"rows have one label.*got 1 rows"):
        fit_bag_of_words(rows("train", early, 1), validation, "assistant")
    silent = rows("train", lambda label, noise: [Message("user", "?!")])
    with pytest.raises(GuardError, match="no words that differ"):
        fit_bag_of_words(silent, validation, "assistant")


@pytest.mark.slow
def test_the_command_measures_folders_and_files(tmp_path: Path) -> None:
    """Without adapters or a model; who is judged is who speaks last."""
    folder = tmp_path / "mine"
    for split in SPLITS:
        write_examples(folder / f"{split}.jsonl", rows(split, last))
    file = tmp_path / "toy__file.jsonl"
    lines = []
    for split in SPLITS:
        for row in rows(split, last):
            messages = [{"role": it.role, "content": it.content} for it in row.messages]
            lines.append(json.dumps({"messages": messages, "label": row.label}))
    file.write_text("\n".join(dict.fromkeys(lines)))
    command = [sys.executable, "-m", "eval.bag_of_words", "--data", folder, file]
    command += ["--splits", "new", "--json", tmp_path / "out.json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "out.json").read_text())
    assert {"commit", "hardware", "versions", "seed"} <= set(content)
    assert content["rules"]["mine"]["metrics"]["auroc"] == 1.0
    assert content["rules"]["mine"]["variant"]["view"] == "last turn"
    assert set(content["rules"]) == {"mine", "toy__file"}
    assert "| toy__file" in done.stdout
    missing = subprocess.run(
        [*command[:4], tmp_path], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert missing.returncode == 2
    assert "error: " in missing.stderr and "no train.jsonl" in missing.stderr
