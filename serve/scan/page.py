"""The page that a person reads before new weights are published: `replay.html`, one file.

It quotes stored conversations, so it is as confidential as they are. Knows nothing of engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from guard.conversation.example import Message
from serve.scan.flips import Flip, ReplayTally
from serve.scan.sources import read_source
from serve.scan.versions import VersionPair

LAST_TURNS, LAST_CHARACTERS = 4, 600  # what is shown of a conversation, and of each turn
ELLIPSIS = "…"
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse } td, th { padding: .15rem .8rem .15rem 0; text-align: left }
td, th { vertical-align: top } pre { white-space: pre-wrap; margin: 0; font-size: 13px }
article { border-top: 1px solid #ccc; padding: .6rem 0 } .role { color: #555 }
.note { background: #fff4d6; padding: .4rem .7rem }
"""
# Stored text is shown and never run, whatever it holds.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"

Place = tuple[str, int]  # a conversation's source, and its row there
Texts = Mapping[Place, Sequence[Message]]


def excerpts(places: Iterable[Place]) -> dict[Place, tuple[Message, ...]]:
    """The end of each conversation. Raises GuardError for a source that cannot be read any more."""
    by_source: dict[str, set[int]] = {}
    for source, row in places:
        by_source.setdefault(source, set()).add(row)
    texts: dict[Place, tuple[Message, ...]] = {}
    for source, rows in by_source.items():
        last = max(rows)
        for stored in read_source(source):
            if stored.number in rows:
                texts[source, stored.number] = shortened(stored.messages)
            if stored.number >= last:
                break
    return texts


def shortened(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The last turns of a conversation, and of each its end: there mostly is what is judged."""
    turns: list[Message] = []
    for message in messages[-LAST_TURNS:]:
        content = message.content
        if len(content) > LAST_CHARACTERS:
            content = ELLIPSIS + content[-LAST_CHARACTERS:]
        turns.append(Message(message.role, content))
    return tuple(turns)


def page(title: str, notes: Sequence[str], sections: Sequence[str]) -> str:
    """The page of `rule_section`s."""
    lines = [f"<h1>{escape(title)}</h1>", *(_note(line) for line in notes), *sections]
    body = "\n".join(lines)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Replay</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f"<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def rule_section(pair: VersionPair, tally: ReplayTally, texts: Texts) -> str:
    """One rule's figures, and its flips with the `texts` of their conversations."""
    parts = [f"<h2>{escape(pair.rule)}</h2>", "<table>"]
    for label, version in (("A", pair.a), ("B", pair.b)):
        weights = f"{version.folder} ({version.card.method}, {version.card.version[:12]})"
        parts.append(_table_row(label, weights))
    parts += [_table_row(label, text) for label, text in tally.as_text().items()]
    parts += ["</table>", *(_note(sentence) for sentence in pair.differences)]
    flips = tally.largest()
    parts.append(
        f"<h3>{len(flips):,} of {tally.counts['flips']:,} flips, largest change first</h3>"
    )
    parts += [_article(flip, texts.get((flip.source, flip.row))) for flip in flips]
    return "\n".join(parts)


def _note(text: str) -> str:
    return f"<p class=note>{escape(text)}</p>"


def _table_row(label: str, text: str) -> str:
    return f"<tr><th>{escape(label)}</th><td>{escape(text)}</td></tr>"


def _article(flip: Flip, messages: Sequence[Message] | None) -> str:
    where = f"{flip.source}, row {flip.row}"
    if flip.id:
        where += f", id {flip.id}"
    change = (
        f"{flip.verdict_a} {flip.p_a:.3f} → {flip.verdict_b} {flip.p_b:.3f} ({flip.change:+.3f})"
    )
    lines = [f"<article><b>{escape(change)}</b><br><span class=role>{escape(where)}</span>"]
    if messages is None:
        lines.append("<p>The conversation is no longer there.</p>")
    for message in messages or ():
        role, content = escape(message.role), escape(message.content)
        lines.append(f"<pre><span class=role>{role}:</span> {content}</pre>")
    return "\n".join([*lines, "</article>"])
