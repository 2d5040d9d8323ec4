"""OpenAI's chat messages as turns of a conversation: one rendering, for training and for serving.

A turn's lines are, in this order: who it is from, its text, its refusal, and a line of JSON for
each tool call. Later messages change no turn before them. What `keys.py` lists is not rendered. A
turn with a picture, a sound, a file or a key that nobody knows is a PartlyRead.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from guard.conversation import keys
from guard.conversation.example import Message, as_messages
from guard.errors import GuardError
from guard.layout import fingerprint
from guard.prompt.encodings import without_escapes
from guard.prompt.text import visible
from guard.wrong_values import wrong_values

# OpenAI's role -> ours.
ROLES = {
    "developer": "system",
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
MAX_PARTS, MAX_CALLS = 10_000, 1_000  # of a message
# Characters of all arguments of a conversation, as they were sent. They are JSON inside a string,
# whose values no limit of a body counts: these many are decoded in a fraction of a second.
MAX_ARGUMENTS = 1_000_000
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
# The type of a part that holds no text -> what it is.
OTHER_PARTS = {
    **dict.fromkeys(("image_url", "input_image"), "an image"),
    **dict.fromkeys(("file", "input_file"), "a file"),
    "input_audio": "a sound",
}
TOOLS = "Tools:\n"  # how the turn that describes the tools begins
INK = re.compile("[!-~]")  # of ASCII, what a reader sees
PIECE = re.compile(r"\S.{0,4000}\S*", re.DOTALL)  # of a text; no escape goes on behind a space
# JSON's escapes of characters, next to each other: one character may take two (UTF-16).
ESCAPES = re.compile(r"(?:\\u[0-9a-fA-F]{4})+")
FUNCTION_KEYS = ("function", "custom")  # of a tool or a tool call: what is read as its function


# Messages with all that is rendered, and something of what is not.
_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\u0062"}'}}
_SAMPLE: list[dict[str, Any]] = [
    {"role": "developer", "content": "a"},
    {"role": "user", "name": "b", "content": [{"type": "text", "text": "c"}, {"type": "file"}]},
    {"role": "assistant", "refusal": "d", "reasoning": "e", "tool_calls": [_CALL | {"x": 1}]},
    {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "f", "y": "g"}]},
    {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{"}},
]


@dataclass(frozen=True)
class PartlyRead(Message):
    """A turn with parts that no rule can read, as `message 2 has an image`: a violation in the
    parts that are read is one; that there is none cannot be said.
    """

    unread: tuple[str, ...] = ()


class ContentPart(BaseModel):
    """A piece of a message: a text, or something that is no text."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None
    refusal: str | None = None

    @property
    def words(self) -> str | None:
        """Its text, of a model's reasoning none; None if it is no text."""
        if self.type in keys.REASONING_PARTS:
            return ""
        if self.type not in TEXT_PARTS:
            return None
        return "\n".join(text for text in (self.text, self.refusal) if text)

    @property
    def kind(self) -> str:
        is_name = keys.NAME.fullmatch(self.type)
        unknown = f"a part of type {self.type!r}" if is_name else "a part of an unknown type"
        return OTHER_PARTS.get(self.type, unknown)


# The first wrong item is enough: every further error would take a kilobyte.
ContentParts = Annotated[list[ContentPart], Field(max_length=MAX_PARTS, fail_fast=True)]
ToolCalls = Annotated[list[dict[str, Any]], Field(max_length=MAX_CALLS, fail_fast=True)]


class ChatMessage(BaseModel):
    """One of OpenAI's messages."""

    model_config = ConfigDict(extra="allow")

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: str | ContentParts | None = None
    name: str | None = None
    refusal: str | None = None
    audio: Any = None
    tool_calls: ToolCalls | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None  # before there were tool calls

    @property
    def calls(self) -> list[dict[str, Any]]:
        calls = list(self.tool_calls or ())
        if self.function_call:
            calls.append({"function": self.function_call})
        return calls

    def lines(self) -> Iterator[str]:
        """All that the message says, as text; a tool call is rendered when its turn comes."""
        if isinstance(self.content, str) and self.content:
            yield self.content
        for part in self._parts:
            if part.words:
                yield part.words
        if self.refusal:
            yield self.refusal
        for call in self.calls:
            yield _line(keys.spoken(call, keys.CALL))  # without what its provider keeps

    def unread_keys(self) -> Iterator[str]:
        """Its keys, and its texts' keys, under which words may stand that nobody reads."""
        beside = {"tool_call_id": self.tool_call_id, **(self.model_extra or {})}
        yield from keys.unread_keys(beside, keys.MESSAGE)
        for index, part in enumerate(self._parts):
            if part.type in TEXT_PARTS:
                for key in keys.unread_keys(part.model_extra or {}, keys.PART):
                    yield f"content.{index}.{key}"

    @property
    def unread(self) -> list[str]:
        """The parts that are no text, and the first of its unread keys, which may be very many."""
        parts = [part.kind for part in self._parts if part.words is None]
        if self.audio:
            parts.append("a sound")
        first_key = next(self.unread_keys(), None)
        if first_key is not None:
            parts.append(f"the key {first_key!r}")
        return parts

    @property
    def _parts(self) -> list[ContentPart]:
        if isinstance(self.content, list):
            return self.content
        return []


def turns(
    messages: Iterable[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[Message, ...]:
    """Messages as turns, after a system turn that describes `tools` if there are any."""
    messages = list(messages)
    calls = list(itertools.chain.from_iterable(message.calls for message in messages))
    _refuse_long_arguments([*tools, *calls])
    rendered_turns: list[Message] = []
    tool_names: dict[str, str] = {}  # by the id of a tool call
    try:
        if tools:
            rendered_turns.append(Message("system", TOOLS + "\n".join(map(_line, tools))))
        for number, message in enumerate(messages):
            for call in message.calls:
                call_id = call.get("id")
                if isinstance(call_id, str) and call_id:
                    function, _ = function_of(call)
                    tool_names[call_id] = str(function.get("name", ""))
            rendered_turns.append(_turn(number, message, tool_names))
    except RecursionError:
        problem = "a tool or a tool call is nested too deeply to be read"
        remedy = "Send parameters and arguments that are nested less deeply"
        raise GuardError(problem, remedy=remedy) from None
    return tuple(rendered_turns)


def _refuse_long_arguments(calls: Iterable[Mapping[str, Any]]) -> None:
    arguments = [function_of(call)[0].get("arguments") for call in calls]
    characters = sum(len(text) for text in arguments if isinstance(text, str))
    if characters > MAX_ARGUMENTS:
        problem = "the arguments of the tool calls are too long to be read"
        remedy = f"Send at most {MAX_ARGUMENTS}"
        raise GuardError(problem, got=f"{characters} characters", remedy=remedy)


def unread_parts(conversation: Iterable[Message]) -> tuple[str, ...]:
    unread: list[str] = []
    for turn in conversation:
        if isinstance(turn, PartlyRead):
            unread += turn.unread
    return tuple(unread)


def says_nothing(conversation: Iterable[Message]) -> bool:
    """Whether nothing is seen and no part is unread; what describes tools is said by nobody."""
    for turn in conversation:
        describes_tools = turn.role == "system" and turn.content.startswith(TOOLS)
        if not describes_tools and (isinstance(turn, PartlyRead) or is_seen(turn.content)):
            return False
    return True


def turns_of(
    value: Any, tools: Sequence[Mapping[str, Any]] = (), *, where: object
) -> tuple[Message, ...]:
    if not isinstance(value, list | tuple) or not value:
        return as_messages(value, where=where)  # which says what is wrong
    messages = [_chat_message(item, turn, where) for turn, item in enumerate(value)]
    return turns(messages, tools)


def _chat_message(item: Any, turn: int, where: object) -> ChatMessage:
    try:
        return ChatMessage.model_validate(item, strict=True)
    except ValidationError as error:
        wrong, *_ = wrong_values(error.errors(), item)
        why = f"{wrong.key}: {wrong.problem}".removeprefix(": ")
        problem = f"turn {turn} must be {{role, content}} as OpenAI has it: {why}"
        remedy = 'For example {"role": "user", "content": "Hello"}'
        raise GuardError(problem, where=where, got=repr(item)[:60], remedy=remedy) from None


def is_seen(text: str) -> bool:
    """Whether a reader sees anything of it; in pieces: `visible` takes seconds for a long text."""
    for piece in PIECE.finditer(text):
        words = " ".join(set(piece[0].split()))
        plain = without_escapes(words).strip()  # spaces alone are the quickest to find
        if INK.search(plain) or any(map(_is_sign_seen, set(plain))):
            return True
    return False


@lru_cache(maxsize=10_000)  # more than the signs that nobody sees: a seen one ends the search
def _is_sign_seen(sign: str) -> bool:
    return bool(visible(sign).strip())


def rendering_hash() -> str:
    """A fingerprint of how messages and tools become turns, as weights have learned them."""
    rendered = turns_of(_SAMPLE, [{"name": "f"}, _CALL], where="the sample")
    return fingerprint([asdict(turn) for turn in rendered])


def _turn(number: int, message: ChatMessage, tool_names: Mapping[str, str]) -> Message:
    lines = list(message.lines())
    tool_name = tool_names.get(message.tool_call_id or "", "")
    name = message.name or tool_name
    # The name of a tool that gave nothing stands in its call alone.
    if is_seen(name) and (message.name or any(map(is_seen, lines))):
        lines.insert(0, f"From {name}:")
    role = ROLES[message.role]
    unread = tuple(f"message {number} has {part}" for part in message.unread)
    try:
        if unread:
            return PartlyRead(role, "\n".join(lines), unread)
        return Message(role, "\n".join(lines))
    except GuardError as error:
        problem = f"message {number}: {error.problem}"
        raise GuardError(problem, got=error.got, remedy=error.remedy) from error


def function_of(call: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The function of a tool call or of a described tool, and what beside it may be rendered."""
    for key in FUNCTION_KEYS:
        if isinstance(call.get(key), Mapping):
            beside = keys.spoken({name: call[name] for name in call if name != key}, keys.TOOL)
            stated = {name: value for name, value in beside.items() if value is not None}
            return dict(call[key]), stated
    return dict(call), {}


def _line(tool: Mapping[str, Any]) -> str:
    """A tool call or a tool as JSON, then what a chat template may show beside its function."""
    function, beside = function_of(tool)
    if isinstance(function.get("arguments"), str):
        function["arguments"] = _arguments(function["arguments"])
    line = json.dumps(function, ensure_ascii=False)
    if beside:
        line += " " + json.dumps(beside, ensure_ascii=False)
    return line


def _arguments(text: str) -> Any:
    """A call's arguments without escapes, which could hide a word, though they are not JSON."""
    try:
        return json.loads(text, object_pairs_hook=_all_pairs, parse_int=_whole_number)
    except (ValueError, RecursionError):
        return ESCAPES.sub(_unescaped, text)


def _unescaped(escapes: re.Match[str]) -> str:
    code_units = bytes.fromhex(escapes[0].replace("\\u", ""))
    return code_units.decode("utf-16-be", "surrogatepass")


def _all_pairs(pairs: list[tuple[str, Any]]) -> Any:
    """An object; where a key is repeated its pairs, since readers differ in which one counts."""
    distinct = dict(pairs)
    if len(distinct) < len(pairs):
        return pairs
    return distinct


def _whole_number(digits: str) -> int | str:
    """The number, or its digits where they are more than Python parses."""
    try:
        return int(digits)
    except ValueError:
        return digits
