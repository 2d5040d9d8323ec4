"""The page quotes the end of the conversations that flip, and runs nothing of them."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

from guard.conversation.example import Message
from serve.scan.page import ELLIPSIS, LAST_CHARACTERS, excerpts, page, rule_section, shortened
from serve.scan.versions import find_versions
from tests.serve.scan.test_flips import tallied
from tests.serve.scan.test_versions import weights


class Tags(HTMLParser):
    """The names of all tags."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)


def test_the_rows_that_are_named_are_read(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": f"number {it}"}) + "\n" for it in range(10)))
    assert excerpts([(str(file), 7), (str(file), 2)]) == {
        (str(file), 2): (Message("user", "number 2"),),
        (str(file), 7): (Message("user", "number 7"),),
    }
    assert excerpts([]) == {}


def test_a_long_conversation_keeps_its_last_turns_and_their_ends() -> None:
    last = Message("assistant", "the last turn")
    long = Message("user", "y" * 2 * LAST_CHARACTERS + "its end")
    turns = shortened([*[Message("system", "x")] * 9, long, last])
    assert len(turns) == 4 and turns[-1] == last
    assert turns[2].content.startswith(ELLIPSIS) and turns[2].content.endswith("its end")
    assert len(turns[2].content) == LAST_CHARACTERS + 1


def test_flips_stand_on_the_page_with_their_text_and_nothing_is_loaded(tmp_path: Path) -> None:
    a = weights(tmp_path / "a", "mild", "before")
    (pair,) = find_versions(a, weights(tmp_path / "b", "mild", "after", threshold=0.5)).pairs
    texts = {("a.jsonl", 1): (Message("user", "</pre><script>alert(1)</script>"),)}
    tally = tallied([(0.1, 0.2), (0.1, 0.9), (0.7, 0.3), (None, 0.9)])
    html = page("Replay", ["only in B: <new>"], [rule_section(pair, tally, texts)])
    tags = Tags()
    tags.feed(html)
    assert "&lt;script&gt;" in html and not tags.names & {"script", "img", "link", "iframe"}
    assert "default-src 'none'" in html
    assert html.index("allow 0.100 → violation 0.900") < html.index("violation 0.700 → allow 0.300")
    assert "a.jsonl, row 1, id c1" in html and "2 of 2 flips, largest change first" in html
    assert "The conversation is no longer there." in html  # of row 2
    for text in ("it does not fit", "only in B: &lt;new&gt;", "The threshold differs"):
        assert text in html
