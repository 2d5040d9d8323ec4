"""What each view reads, and how words are counted."""

from __future__ import annotations

import pytest
from sklearn.feature_extraction.text import CountVectorizer

from eval.bag_of_words.features import VIEWS, CharacterCounts, text_of
from guard.conversation.example import Message
from guard.rule import Judged, Reads
from tests.eval.bag_of_words.conftest import rows


@pytest.mark.parametrize("speaker", ["user", "assistant", "conversation", "tool"])
def test_a_rule_s_judged_speaker_is_who_is_read(speaker: Judged) -> None:
    (row,) = rows("test", lambda label, noise: [Message("user", "a"), Message("tool", "b")], 1)
    expected = {"user": "a", "assistant": "", "conversation": "a\nb", "tool": "b"}
    assert text_of(row, "judged speaker", speaker) == expected[speaker]
    last_turn = {"user": "a", "assistant": "", "conversation": "b", "tool": "b"}
    assert text_of(row, "last turn", speaker) == last_turn[speaker]


@pytest.mark.parametrize("reads", ["tool", "last tool"])
def test_what_tools_return_may_stand_in_the_system_s_turn(reads: Reads) -> None:
    """As documents do, and as an encoder reads it."""
    turns = [Message("system", "a"), Message("user", "b"), Message("assistant", "c")]
    (row,) = rows("test", lambda label, noise: turns, 1)
    assert text_of(row, "judged speaker", reads) == text_of(row, "last turn", reads) == "a"


def test_every_view_reads_all_the_turns_that_its_name_says() -> None:
    turns = [Message("user", "a"), Message("assistant", "b"), Message("tool", "c")]
    (row,) = rows("test", lambda label, noise: [*turns, Message("assistant", "d")], 1)
    read = {view: text_of(row, view, "assistant") for view in VIEWS}
    assert read == {"whole conversation": "a\nb\nc\nd", "judged speaker": "b\nd", "last turn": "d"}


def test_what_hides_text_is_undone_before_it_is_counted() -> None:
    hidden = Message("user", "d\u200bo\u200bse \uff41\uff42\uff43")
    (row,) = rows("test", lambda label, noise: [hidden], 1)
    assert text_of(row, "whole conversation", "user") == "dose abc"


def test_character_counts_are_scikit_learn_s() -> None:
    texts = ["Take two tablets  daily, not three.", "a b\ntablet", ""]
    ours, theirs = CharacterCounts(), CountVectorizer(analyzer="char_wb", ngram_range=(2, 5))
    expected = theirs.fit_transform(texts)
    assert (ours.fit_transform(texts).toarray() == expected.toarray()).all()
    assert (ours.transform(["", " "]).toarray() == theirs.transform(["", " "]).toarray()).all()
    unseen = ["Tablets, thrice", "two"]
    assert (ours.transform(unseen).toarray() == theirs.transform(unseen).toarray()).all()
