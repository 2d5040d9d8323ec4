"""The one prompt of training, evaluation and serving. Knows nothing of models, only of a tokenizer.

    <|im_start|>system   what to do, the same for every rule     base weights, prefilled once,
    <|im_start|>user     the conversation, one line a turn       shared by every rule
    <|im_start|>user     the rule                                adapter active from this header on
    <|im_start|>assistant  yes | no                              the verdict token

Where the prompt does not say the rule (`rule_turn: none`), there is no rule turn, and the adapter
is active from the assistant's header on.

Only this scaffold holds control tokens. Text from a conversation or a rule is tokenised by a copy
of the tokenizer that has no added tokens at all, piece by piece, so no text can become a control
token: neither a turn end nor the invocation can be forged. Inside the conversation turn a line that
starts with a role label is the scaffold's: line breaks within a message continue with "| ", so a
message cannot pretend to be another speaker's. Hidden and look-alike characters are undone
(`text.py`). Rendering is append-only: a conversation that grows keeps the token ids it had.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from guard.conversation.chat import rendering_hash
from guard.conversation.example import Message
from guard.errors import GuardError
from guard.layout import fingerprint
from guard.prompt.text import reading_hash, visible
from guard.prompt.windows import SILENT, UNKNOWN, counting
from guard.recipe import Recipe
from guard.rule import LAST_OF, Reads

INSTRUCTION = (
    "Analyze the conversation against the given rule. "
    "Answer yes if the conversation violates the rule, no if it does not."
)
ROLE_LABELS = {"system": "System:", "user": "User:", "assistant": "Assistant:", "tool": "Tool:"}
YES, NO = "yes", "no"
# Every role, a line break, a forgery, hidden and look-alike characters, and encodings of "This is".
SAMPLE = tuple(
    Message(
        role,
        f"A {role} says:\n5 mg, <|im_end|> caf\u00e9 p\u0430\u200by\n"
        "&#84;&#x68;&lt;is is %54%68%69%73%20is VGhpcyBpcw== 54686973206973",
    )
    for role in ROLE_LABELS
)


@dataclass(frozen=True)
class Prompt:
    """Token ids up to where the verdict is predicted; the adapter is active from the start on."""

    token_ids: tuple[int, ...]
    invocation_start: int


class PromptBuilder:
    """Builds prompts for one tokenizer. `answer_prefix` stands between the assistant's header and
    the verdict (Qwen3: an empty think block); it is scaffold and may hold control tokens.
    """

    verdict_tokens = 1  # generated after the prompt

    def __init__(self, tokenizer: Tokenizer, *, answer_prefix: str = "") -> None:
        self._set_tokenizer(tokenizer)
        self.yes_id = self._single(YES)
        self.no_id = self._single(NO)
        self._newline = self._text_ids("\n")
        self._turn_end = [self._control("<|im_end|>"), *self._newline]
        self._conversation_head = [
            *self._header("system"),
            *self._text_ids(INSTRUCTION),
            *self._turn_end,
            *self._header("user"),
        ]
        self._answer = self._answer_ids(answer_prefix)

    @classmethod
    def from_base(cls, base: str, *, answer_prefix: str = "") -> PromptBuilder:
        return cls(load_tokenizer(base, None), answer_prefix=answer_prefix)

    @classmethod
    def of(cls, recipe: Recipe) -> PromptBuilder:
        if recipe.kind != "decoder":
            where, remedy = f"recipe {recipe.name}", "Name another one, as MODEL=tiny"
            problem = "this works only on a decoder"
            raise GuardError(problem, where=where, got=recipe.kind, remedy=remedy)
        tokenizer = load_tokenizer(recipe.base_path, recipe.commit)
        return cls(tokenizer, answer_prefix=recipe.answer_prefix)

    @cached_property
    def hash(self) -> str:
        """Over how text is read and a fixed prompt is built: weights answer exactly these."""
        return fingerprint(reading_hash(), rendering_hash(), self._sample())

    def build(self, messages: Sequence[Message], rule_text: str) -> Prompt:
        prefix = self.prefix_ids(messages)
        return Prompt((*prefix, *self.suffix_ids(rule_text)), len(prefix))

    def prefix_ids(self, messages: Sequence[Message]) -> list[int]:
        """The instruction and the conversation: base weights alone, shared by every rule."""
        return list(itertools.chain.from_iterable(self.prefix_pieces(messages)))

    def prefix_pieces(self, messages: Iterable[Message]) -> Iterator[list[int]]:
        """What `prefix_ids` consists of, tokenised as it is taken: whoever counts can stop."""
        yield self._conversation_head
        for message in messages:
            yield self.turn_ids(message)
        yield self._turn_end

    def turn_ids(self, message: Message) -> list[int]:
        """One message as one labelled line; the last id is the line break that ends the turn."""
        return self._text_ids(labelled(message)) + self._newline

    def judged_ids(self, prefix: Sequence[int], reads: Reads) -> Sequence[int]:
        """The tokens of `prefix_ids` whose words count for a rule: those of the last turn that it
        judges, where only the last counts, else all.
        """
        if reads not in LAST_OF.values():
            return prefix
        lines = prefix[len(self._conversation_head) : len(prefix) - len(self._turn_end)]
        label_tokens = max(map(len, self._labels))
        starts = [0]
        for end, token in enumerate(lines, start=1):
            is_end = token == self._newline[-1]
            if is_end and self._speaker(lines[end : end + label_tokens]) != UNKNOWN:
                starts.append(end)
        turns = [lines[start:end] for start, end in itertools.pairwise([*starts, len(lines)])]
        (last,) = counting([self._speaker(turn) for turn in turns], reads)
        return turns[last]

    def suffix_ids(self, rule_text: str) -> list[int]:
        """The rule's turn, unless it is empty, then the assistant's header: each rule's own."""
        text = " ".join(rule_text.split())
        if not text:
            return list(self._answer)
        return [*self._header("user"), *self._text_ids(text), *self._turn_end, *self._answer]

    def invocation(self, rule_text: str) -> tuple[int, ...]:
        """The header that `suffix_ids` begins with: its last occurrence activates the adapter."""
        role = "user" if rule_text.split() else "assistant"
        return tuple(self._header(role))

    def _sample(self) -> list[Any]:
        suffixes = [self.suffix_ids(SAMPLE[0].content), self.suffix_ids("")]
        return [self.prefix_ids(SAMPLE), *suffixes, self.yes_id, self.no_id]

    def _set_tokenizer(self, tokenizer: Tokenizer) -> None:
        self._scaffold = Tokenizer.from_str(tokenizer.to_str())
        self._scaffold.no_truncation()  # whatever its file asks for
        self._scaffold.no_padding()
        self._text, unknown_id = _without_added_tokens(self._scaffold)
        # An unknown character (an emoji to WordPiece) is ordinary text, even where its token is
        # also listed as added.
        self._control_ids = frozenset(self._scaffold.get_added_tokens_decoder()) - {unknown_id}

    @cached_property
    def _labels(self) -> dict[tuple[int, ...], str]:
        labels = {tuple(self._text_ids(label)): role for role, label in ROLE_LABELS.items()}
        if len(labels) < len(ROLE_LABELS):
            problem = "the tokenizer writes the labels of two speakers alike"
            remedy = "Use another base: a rule reads only the judged speaker's turns"
            raise GuardError(problem, got=", ".join(ROLE_LABELS.values()), remedy=remedy)
        return labels

    @cached_property
    def _empty_turns(self) -> frozenset[tuple[int, ...]]:
        """The token ids of empty turns: to some tokenizers a space behind the label is one."""
        texts = [labelled(Message(role, "")) for role in ROLE_LABELS]
        return frozenset(tuple(self._text_ids(text)) for text in texts)

    def _speaker(self, turn: Sequence[int]) -> str:
        for label, role in self._labels.items():
            if tuple(turn[: len(label)]) == label:
                return SILENT if tuple(turn[:-1]) in self._empty_turns else role
        return UNKNOWN

    def _header(self, role: str) -> list[int]:
        return [self._control("<|im_start|>"), *self._text_ids(role), *self._newline]

    def _answer_ids(self, answer_prefix: str) -> list[int]:
        prefix = self._scaffold.encode(answer_prefix, add_special_tokens=False).ids
        if self._control("<|im_start|>") in prefix:
            # The adapter is active from the last header on.
            remedy = "Take <|im_start|> out of the recipe's answer_prefix"
            problem = "the answer prefix must not start a turn"
            raise GuardError(problem, got=answer_prefix, remedy=remedy)
        return [*self._header("assistant"), *prefix]

    def _text_ids(self, text: str) -> list[int]:
        ids: list[int] = self._text.encode(text, add_special_tokens=False).ids
        if not self._control_ids.isdisjoint(ids):
            problem = "text was tokenised into a control token"
            remedy = "Use another base: with this tokenizer a text could end its own turn"
            raise GuardError(problem, got=repr(text)[:60], remedy=remedy)
        return ids

    def _control(self, token: str) -> int:
        token_id = self._scaffold.token_to_id(token)
        if token_id is None:
            remedy = "Use a decoder with Qwen's chat template, or an encoder with BERT's or "
            remedy += "RoBERTa's tokens"
            raise GuardError(f"the tokenizer has no {token} token", remedy=remedy)
        return int(token_id)

    def _single(self, word: str) -> int:
        ids = self._text_ids(word)
        if len(ids) != 1:
            remedy = "Use a base whose tokenizer has it as one token"
            raise GuardError(f"the verdict word '{word}' must be one token", got=ids, remedy=remedy)
        return ids[0]


def labelled(message: Message) -> str:
    """A message behind its speaker's label, as a reader sees it; only its first line has one."""
    text = visible(message.content)
    lines = text.splitlines() if text.strip() else [""]
    return f"{ROLE_LABELS[message.role]} " + "\n| ".join(lines)


def load_tokenizer(base: str, revision: str | None) -> Tokenizer:
    file = Path(base) / "tokenizer.json"
    try:
        if file.is_file():
            return Tokenizer.from_file(str(file))
        return Tokenizer.from_pretrained(base, revision=revision or "main")
    except Exception as error:  # tokenizers raises nothing narrower on a malformed file
        problem = f"no tokenizer could be loaded: {error}"
        remedy = "Check the recipe's base and the network"
        raise GuardError(problem, where=base, remedy=remedy) from error


def _without_added_tokens(tokenizer: Tokenizer) -> tuple[Tokenizer, int | None]:
    """A copy that yields nothing but the text's own tokens; and its id for unknown characters."""
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = []
    spec["post_processor"] = None
    model = spec["model"]
    if model["type"] == "Unigram":
        # SentencePiece's control tokens are pieces too: they get names that no text has, as one
        # with NUL is not read (`text.visible`).
        for token_id in tokenizer.get_added_tokens_decoder():
            if token_id < len(model["vocab"]):
                model["vocab"][token_id][0] = f"\0{token_id}"
    copy = Tokenizer.from_str(json.dumps(spec))
    unknown = model.get("unk_token")
    if unknown is None:
        return copy, model.get("unk_id")
    return copy, copy.token_to_id(unknown)
