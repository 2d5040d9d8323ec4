"""The page quotes conversations and runs nothing of them."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

from guard.conversation.example import Message
from serve.replay.page import save_page
from tests.serve.replay.test_report import report_of


class Tags(HTMLParser):
    """The names of all tags, and the sources of all pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.pictures: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.pictures += [value or "" for name, value in attrs if name == "src"]


def test_flips_stand_on_the_page_with_their_text_and_nothing_is_loaded(tmp_path: Path) -> None:
    attack = "</pre><script>alert(1)</script>"
    texts = {("a.jsonl", 1): (Message("user", attack),)}
    save_page(tmp_path, report_of(tmp_path), {"mild": b"png"}, texts)
    page = (tmp_path / "replay.html").read_text()
    tags = Tags()
    tags.feed(page)
    assert "script" not in tags.names and "&lt;script&gt;" in page
    assert tags.pictures == ["data:image/png;base64,cG5n"]
    assert page.index("allow 0.100 → violation 0.900") < page.index("violation 0.700 → allow 0.300")
    assert "a.jsonl, row 1, id c1" in page and "2 flips, largest change first" in page
    assert "The conversation is no longer there." in page  # of row 2
    assert "it does not fit" in page and "only in B: new" in page
    assert "default-src &#x27;none&#x27;" in page or "default-src 'none'" in page
