"""When a reply is checked, and what of it is released."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serve.client.reply import Reply

ASKED = [{"role": "user", "content": "Hello"}]


def test_a_check_is_due_at_a_sentence_s_end_or_after_so_many_characters() -> None:
    reply = Reply(ASKED, check_characters=10)
    due = [reply.add(piece) for piece in ("abc", " def", "ghi", "!", "j")]
    assert due == [False, False, True, True, True]
    reply.allowed()
    assert not reply.add("k")


def test_the_conversation_ends_with_the_whole_reply_so_far() -> None:
    reply = Reply(ASKED)
    assert reply.is_empty
    reply.add("One ")
    reply.add("two")
    assert reply.conversation == [*ASKED, {"role": "assistant", "content": "One two"}]


@given(st.lists(st.text(max_size=30), min_size=1), st.integers(0, 40))
def test_no_more_is_released_than_was_checked(pieces: list[str], hold_back: int) -> None:
    reply, released, text = Reply(ASKED, hold_back=hold_back), "", ""
    for piece in pieces:
        text += piece
        if reply.add(piece):
            released += reply.allowed()
            assert text.startswith(released)
            assert len(released) == max(0, len(text) - hold_back)
    assert released + reply.ended() == text
