"""What GLiNER2 reads of a conversation and a rule: the rule as a schema, then the conversation's
words (Zaratiana et al. 2025, arXiv 2507.18546).

    ( [P] violation ( [L] the rule ) ) [SEP_TEXT] user : … [SEP] assistant : … [SEP] …

The schema is one classification task with one label; its logit is what the classifier reads at [L].
Of a long conversation's windows, each behind the schema, the one with the highest logit counts.
Words are split, put in lower case and tokenised one by one, as the package gliner2 does. The [SEP]
that ends a turn is ours: without one, a text could go on as another speaker.
"""

from __future__ import annotations

import functools
import re
import sys
import unicodedata
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.prompt.decoder import SAMPLE, labelled
from guard.prompt.encoder import EncoderPromptBuilder
from guard.prompt.windows import UNKNOWN, Span, Window, cut_windows
from guard.rule import Reads

TASK = "violation"
TASK_MARKER, LABEL_MARKER, TEXT_MARKER = "[P]", "[L]", "[SEP_TEXT]"
LARGEST_SHARE = 0.5  # the part of a window that a schema may take


class Gliner2PromptBuilder(EncoderPromptBuilder):
    """Builds GLiNER2's prompts: the turns, then the schema from its marker [P] on. `windows` puts
    it before the turns of each window, where GLiNER2 has it.
    """

    def __init__(self, tokenizer: Tokenizer, window_tokens: int) -> None:
        super().__init__(tokenizer, window_tokens)
        self.task_id = self._control(TASK_MARKER)
        self.label_id = self._control(LABEL_MARKER)
        self.text_id = self._control(TEXT_MARKER)

    def _sample(self) -> list[Any]:
        schema = self._schema_ids(SAMPLE[0].content)
        start = self._start(schema)
        ids = self.prefix_ids(SAMPLE * 3)
        windows = cut_windows(ids, start, self.separator_id, limit=len(start) + 32)
        window_ids = [window.token_ids for window in windows]
        return [ids, schema, window_ids, self.window_tokens]

    def turn_ids(self, message: Message) -> list[int]:
        ids: list[int] = []
        for word in words(labelled(message)):
            ids += self._text_ids(word)
        return ids

    def suffix_ids(self, rule_text: str) -> list[int]:
        text = " ".join(rule_text.split())
        if not text:
            problem = "GLiNER2 reads a rule as its label, and this has no text"
            remedy = "Write `rule_turn: title` or `policy` in the recipe, and train again"
            raise GuardError(problem, remedy=remedy)
        ids = self._schema_ids(text)
        most = round(LARGEST_SHARE * self.window_tokens)
        if len(ids) > most:
            problem = "the rule's text leaves too little of a window to the conversation"
            remedy = f"At most {most}: write `rule_turn: title`, or raise window_tokens"
            raise GuardError(problem, got=f"{len(ids)} tokens", remedy=remedy)
        return ids

    def windows(self, token_ids: Sequence[int], reads: Reads) -> list[Window]:
        """Whoever is judged, they are the same: the label names the speaker."""
        end = token_ids.index(self.task_id)
        start = self._start(token_ids[end:])
        return cut_windows(token_ids[:end], start, self.separator_id, self.window_tokens)

    def spans(self, window: Window) -> list[Span]:
        label = window.token_ids.index(self.label_id)
        return [Span(label, label + 1, UNKNOWN, 0)]

    def _schema_ids(self, label: str) -> list[int]:
        task = [self.task_id, *self._text_ids(TASK), *self._text_ids("(")]
        end = self._text_ids(")")
        return [*task, self.label_id, *self._text_ids(label), *end, *end, self.text_id]

    def _start(self, schema: Sequence[int]) -> tuple[int, ...]:
        return (*self._text_ids("("), *schema)


def words(text: str) -> list[str]:
    return [match.group().lower() for match in _word().finditer(text)]


@functools.cache
def _word() -> re.Pattern[str]:
    """gliner2's own pattern (`gliner2/processing/word_splitter.py`, Apache-2.0), with the bounds of
    RFC 5321 in an e-mail address: a text of dots would take minutes.
    """
    points = map(chr, range(sys.maxunicode + 1))
    marks = "".join(point for point in points if unicodedata.category(point).startswith("M"))
    letter = rf"[\w{marks}\u200c\u200d]"
    alternatives = (
        r"(?:https?://[^\s]+|www\.[^\s]+)",
        r"[a-z0-9._%+-]{1,64}@[a-z0-9.-]{1,255}\.[a-z]{2,}",
        r"@[a-z0-9_]+",
        rf"{letter}+(?:[-_]{letter}+)*",
        r"\S",
    )
    return re.compile("|".join(alternatives), re.IGNORECASE)
