"""What is kept is encrypted and goes when it must; a label counts once reviewers agree."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.layout import Runs
from serve.registry import reviews
from tests.serve.review_store import SECRET, checked, new_key, of, opened

DAY_S = 24 * 3600


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    key = new_key()
    monkeypatch.setenv(reviews.KEY, key)
    yield key


def queued(
    store: reviews.ReviewStore, reviewer: str = "ann", rule: str | None = "mild"
) -> list[str]:
    return [review.request_id for review in store.queue(reviewer, rule)]


def test_the_file_holds_no_word_of_a_conversation_nor_of_a_note(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.keep(checked("a"))
    store.vote(of("a", "ann"), "violation", note=f"it says that {SECRET}")
    (review,) = store.queue("bob", "mild")
    assert review.messages == (Message("user", SECRET),)
    assert review.notes == [f"it says that {SECRET}"]
    assert review.conversation != "key a"  # whoever knows the text can make that
    for plain in (SECRET, "key a"):
        assert plain.encode() not in store.file.read_bytes()
    assert store.file.stat().st_mode & 0o077 == 0


def test_the_queue_has_the_most_pressing_first_and_last_what_a_single_one_brought(
    tmp_path: Path,
) -> None:
    store = opened(tmp_path)
    for check in (
        checked("reported"),
        checked("sampled"),
        checked("flagged", "violation"),
        checked("uncertain", confident=False),
    ):
        store.keep(check)
    store.vote(of("reported", "bob"), "violation")
    unkept = replace(checked("brought"), verdicts=())
    store.vote(of("brought", "bob"), "violation", brought=unkept)
    order = ["reported", "uncertain", "flagged", "sampled", "brought"]
    assert queued(store) == order
    assert [review.reason for review in store.queue("ann", "mild")] == order
    assert len(store.queue("ann")) == 9 and len(store.queue("ann", limit=3)) == 3
    assert queued(store, "bob") == order[1:-1]


def test_a_label_is_settled_by_two_who_agree_and_none_who_disagrees(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.keep(checked("a"))
    for _ in range(2):  # the same again changes nothing
        assert not store.vote(of("a", "ann"), "violation").settled
    with pytest.raises(reviews.VoteRefused, match="has voted"):
        store.vote(of("a", "ann"), "allow")
    assert store.vote(of("a", "bob"), "violation").settled
    assert [label.label for label in store.settled("mild")] == ["violation"]
    assert store.settled("other") == [] and queued(store, "eve") == []
    assert not store.vote(of("a", "eve"), "allow").settled
    assert store.progress()[0] == ("mild", 0, 0, 0, 1) and store.settled("mild") == []
    assert store.withdraw(of("a", "eve")).settled
    with pytest.raises(reviews.NotKept):
        store.withdraw(of("a", "eve"))


def test_what_was_not_kept_is_kept_as_it_is_brought(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with pytest.raises(reviews.NotKept, match="not sampled, or has expired"):
        store.vote(of("a", "ann"), "allow")
    store.vote(of("a", "ann"), "allow", brought=replace(checked("a"), verdicts=()))
    assert store.vote(of("a", "bob"), "allow").settled
    store.keep(replace(checked("a"), conversation="another"))
    with pytest.raises(reviews.VoteRefused, match="2 checks have this request id"):
        store.vote(of("a", "eve"), "allow")
    (review,) = store.queue("eve", "mild")
    voted = replace(of("a", "eve"), conversation=review.conversation)
    assert store.vote(voted, "allow").allow == 1


def test_a_tenant_brings_no_more_than_others_come_to_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.registry.reviews.MOST_BROUGHT", 2)
    store = opened(tmp_path, reviews=1)

    def bring(name: str, tenant: str = "shop") -> None:
        brought = replace(checked(name), tenant=tenant, verdicts=())
        store.vote(replace(of(name, f"tenant:{tenant}"), tenant=tenant), "allow", brought=brought)

    store.keep(replace(checked("kept"), tenant="shop"))
    bring("a")
    bring("b")
    with pytest.raises(reviews.VoteRefused, match="Have an admin label or delete some"):
        bring("c")
    bring("c", tenant="bank")
    store.vote(of("a", "ann"), "allow")
    bring("d")


def test_a_later_check_of_a_stream_takes_the_place_of_one_without_votes(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for text in ("That", "That is", "That is all"):
        store.keep(checked("a", text=text))
    store.vote(of("a", "ann"), "allow")
    store.keep(checked("a", text="Another text, under a label that it never got"))
    (review,) = store.queue("bob", "mild")
    assert review.messages == (Message("user", "That is all"),)


def test_what_expires_goes_also_after_a_clock_that_was_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    store = opened(tmp_path, retention_days=2)
    now += 3650 * DAY_S
    store.keep(checked("while it is ahead"))
    now -= 3650 * DAY_S
    store.keep(checked("first"))
    now += 1.5 * DAY_S
    store.keep(checked("last"))
    assert len(queued(store)) == 3
    now += 1.5 * DAY_S
    store.expire()
    assert store.progress()[0].waiting == 1  # those that nobody asks for are gone too
    (review,) = store.queue("ann", "mild")
    assert review.request_id == "last"
    assert store.forget(review.conversation) == 1 and queued(store) == []
    store.keep(checked("one more"))
    now += 9 * DAY_S
    opened(tmp_path, retention_days=2)
    with closing(sqlite3.connect(store.file)) as connection:
        assert connection.execute("SELECT count(*) FROM kept").fetchone() == (0,)


def test_content_of_another_key_is_shown_as_such_and_read_once_that_key_is_there_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    store = opened(tmp_path)
    store.keep(checked("a"))
    second = new_key()
    monkeypatch.setenv(reviews.KEY, second)
    store.keep(checked("b"))
    assert [review.messages is None for review in store.queue("ann", "mild")] == [False, True]
    monkeypatch.setenv(reviews.KEY, f"{second},{key}")
    assert all(review.messages for review in store.queue("ann"))
    for wrong, problem in (("", "is not set"), ("short", "is no key")):
        monkeypatch.setenv(reviews.KEY, wrong)
        with pytest.raises(GuardError, match=f"{problem}.*Fernet.generate_key"):
            store.open()


def test_votes_at_once_all_count(tmp_path: Path) -> None:
    store = opened(tmp_path, reviews=8)
    store.keep(checked("a"))
    with ThreadPoolExecutor(8) as pool:
        tallies = list(pool.map(lambda name: store.vote(of("a", name), "allow"), "abcdefgh"))
    assert sorted(tally.allow for tally in tallies) == list(range(1, 9))
    assert [tally.settled for tally in tallies].count(True) == 1


def test_a_policy_keeps_its_shares_of_the_conversations() -> None:
    policy = reviews.ReviewPolicy(share=0.1, uncertain=0.3, flagged=0.0)

    def kept(*, is_uncertain: bool = False, is_flagged: bool = False) -> set[str]:
        keys = map(str, range(2000))
        wants = {"is_uncertain": is_uncertain, "is_flagged": is_flagged}
        return {key for key in keys if policy.keeps(key, **wants)}

    assert 140 < len(kept()) < 260 and kept() == kept(is_flagged=True)
    assert 500 < len(kept(is_uncertain=True)) < 700 and kept() < kept(is_uncertain=True)


def test_a_policy_with_an_unknown_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("shares: 0.5\n")
    with pytest.raises(GuardError, match="Did you mean 'share'"):
        reviews.open_reviews(tmp_path / "policy.yaml", Runs(tmp_path))
    assert reviews.open_reviews(None, Runs(tmp_path)) is None
