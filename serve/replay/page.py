"""The page that a person reads before new weights are published: `replay.html`, one file.

It quotes stored conversations, so it is as confidential as they are. Knows nothing of engines.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from guard.conversation.example import Message
from guard.files.atomic import atomic_write
from serve.replay.excerpts import Origin
from serve.replay.report import ReplayReport, figures
from serve.replay.summary import ReplayedConversation, RuleReplay

PAGE = "replay.html"
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse } td, th { padding: .15rem .8rem .15rem 0; text-align: left }
td, th { vertical-align: top } pre { white-space: pre-wrap; margin: 0; font-size: 13px }
article { border-top: 1px solid #ccc; padding: .6rem 0 } img { max-width: 100% }
.note { background: #fff4d6; padding: .4rem .7rem } .role { color: #555 }
"""
# Stored text is shown and never run, whatever it holds.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def save_page(
    folder: Path,
    report: ReplayReport,
    pictures: Mapping[str, bytes],
    texts: Mapping[Origin, Sequence[Message]],
) -> None:
    """Write `replay.html`, whole or not at all: `pictures` are PNGs by rule, `texts` the excerpts
    of the conversations that flip.
    """
    parts = [
        f"<h1>Replay: {report.conversations:,} conversations, A against B</h1>",
        "<p class=note>This page quotes recorded conversations. It has no labels: a flip says that "
        "A and B disagree, not which of them is right.</p>",
        *(f"<p class=note>{escape(line)}</p>" for line in report.left_out()),
    ]
    for replay in report.rules:
        parts += _section(report, replay, pictures.get(replay.rule), texts)
    body = "\n".join(parts)
    html = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Replay</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f"<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )
    with atomic_write(folder / PAGE) as part:
        part.write_text(html, encoding="utf-8")


def _section(
    report: ReplayReport,
    replay: RuleReplay,
    picture: bytes | None,
    texts: Mapping[Origin, Sequence[Message]],
) -> list[str]:
    pair = report.pair(replay.rule)
    parts = [f"<h2>{escape(replay.rule)}</h2>", "<table>"]
    for label, version in (("A", pair.a), ("B", pair.b)):
        weights = f"{version.folder} ({version.card.method}, {version.card.version[:12]})"
        parts.append(_table_row(label, weights))
    for label, text in figures(replay):
        parts.append(_table_row(label.strip(), text))
    parts.append("</table>")
    parts += [f"<p class=note>{escape(sentence)}</p>" for sentence in pair.differences]
    if picture is not None:
        data = base64.b64encode(picture).decode()
        alt = "p(B) against p(A), and a histogram of the differences"
        parts.append(f'<p><img alt="{alt}" src="data:image/png;base64,{data}"></p>')
    if replay.reasons:
        parts.append("<h3>Why some are unjudged</h3><table>")
        parts += [_table_row(f"{count:,}", reason) for reason, count in replay.reasons.items()]
        parts.append("</table>")
    parts.append(f"<h3>{_flips_heading(replay)}</h3>")
    for conversation in replay.flipped:
        parts.append(_article(conversation, texts.get((conversation.source, conversation.row))))
    return parts


def _flips_heading(replay: RuleReplay) -> str:
    total, shown = replay.flips.count, len(replay.flipped)
    if shown < total:
        return f"The {shown:,} flips with the largest change, of {total:,}"
    return f"{total:,} flips, largest change first"


def _table_row(label: str, text: str) -> str:
    return f"<tr><th>{escape(label)}</th><td>{escape(text)}</td></tr>"


def _article(conversation: ReplayedConversation, messages: Sequence[Message] | None) -> str:
    where = f"{conversation.source}, row {conversation.row}"
    if conversation.id:
        where += f", id {conversation.id}"
    change = (
        f"{conversation.verdict_a} {conversation.p_a:.3f} → "
        f"{conversation.verdict_b} {conversation.p_b:.3f} ({conversation.change:+.3f})"
    )
    lines = [f"<article><b>{escape(change)}</b><br><span class=role>{escape(where)}</span>"]
    if messages is None:
        lines.append("<p>The conversation is no longer there.</p>")
    for message in messages or ():
        role, content = escape(message.role), escape(message.content)
        lines.append(f"<pre><span class=role>{role}:</span> {content}</pre>")
    return "\n".join([*lines, "</article>"])
