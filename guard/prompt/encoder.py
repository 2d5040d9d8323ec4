"""What an encoder reads of a conversation, in training, evaluation and serving alike.

    User: … [SEP] Assistant: … [SEP] …       one labelled turn after another, without any rule

A rule's head reads the mean state of each of the judged speaker's turns, or of each part of a long
one; the highest logit of a span is the conversation's. Text is tokenised as the decoder's is: it
can hold no [SEP], so no text can end its own turn. A turn's label names its speaker, and is read
before the turn is cut: no part of a text can pass for a label.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, get_args

from tokenizers import Tokenizer

from guard.conversation.example import Message
from guard.prompt.decoder import SAMPLE, PromptBuilder, labelled, load_tokenizer
from guard.prompt.windows import (
    OVERLAP,
    SILENT,
    SPAN_TOKENS,
    UNKNOWN,
    Span,
    Window,
    cut_spans,
    cut_windows,
    select_counting_turns,
)
from guard.recipe import Recipe
from guard.rule import SPEAKERS, Judged, Reads

# A window's first token, and the one that ends a turn: BERT's, or RoBERTa's.
CONTROLS = (("[CLS]", "[SEP]"), ("<s>", "</s>"))


class EncoderPromptBuilder(PromptBuilder):
    """Builds an encoder's prompts: the turns, each with the separator that ends it, and no suffix.
    `windows` cuts them into what the encoder reads, `spans` a window into what a head reads.
    """

    verdict_tokens = 0

    def __init__(self, tokenizer: Tokenizer, window_tokens: int) -> None:
        self._set_tokenizer(tokenizer)
        self.window_tokens = window_tokens
        of_base = [names for names in CONTROLS if self._scaffold.token_to_id(names[0]) is not None]
        start, separator = (of_base or CONTROLS)[0]
        self.start_id, self.separator_id = self._control(start), self._control(separator)

    @classmethod
    def of(cls, recipe: Recipe) -> EncoderPromptBuilder:
        assert recipe.window_tokens is not None  # a recipe of an encoder has it
        tokenizer = load_tokenizer(recipe.base_path, recipe.commit)
        return cls(tokenizer, recipe.window_tokens)

    def _sample(self) -> list[Any]:
        ids = self.prefix_ids(SAMPLE * 3)
        windows_and_spans = []
        for window in self._cut(ids, limit=32):
            spans = [span[:3] for span in cut_spans(window, limit=5)]  # without the turn's number
            windows_and_spans.append([window.token_ids, spans])
        constants = [self.start_id, self.window_tokens, OVERLAP, SPAN_TOKENS]
        speakers = {judged: SPEAKERS[judged] for judged in get_args(Judged)}
        return [ids, windows_and_spans, constants, speakers, SILENT]

    def prefix_pieces(self, messages: Iterable[Message]) -> Iterator[list[int]]:
        for message in messages:
            yield [*self.turn_ids(message), self.separator_id]

    def turn_ids(self, message: Message) -> list[int]:
        return self._text_ids(labelled(message))

    def suffix_ids(self, rule_text: str) -> list[int]:
        """Nothing: a rule is what its head has learned."""
        return []

    def invocation(self, rule_text: str) -> tuple[int, ...]:
        """Nothing: an encoder's adapter acts on every token."""
        return ()

    def windows(self, token_ids: Sequence[int], reads: Reads) -> list[Window]:
        """The windows that the encoder reads, each with the turns that count, one or more."""
        return select_counting_turns(self._cut(token_ids, self.window_tokens), reads)

    def _cut(self, token_ids: Sequence[int], limit: int) -> list[Window]:
        return cut_windows(token_ids, (self.start_id,), self.separator_id, limit, self._speaker)

    def opening(self, token_ids: Sequence[int], reads: Reads) -> list[int]:
        """The turns before the first judged one; none if no judged speaker speaks."""
        start = 0
        for end, token in enumerate(token_ids, start=1):
            if token == self.separator_id:
                if self._speaker(token_ids[start:end]) in (*SPEAKERS[reads], UNKNOWN):
                    return list(token_ids[:start])
                start = end
        return []

    def spans(self, window: Window) -> list[Span]:
        return cut_spans(window, SPAN_TOKENS)
