"""Which prompts a call's requests become: in which order, when, and which requests share one. A
long call keeps no other waiting. Knows nothing of what computes them.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from guard.conversation.example import Message
from guard.errors import GuardError
from serve.engine.adapter import ServableAdapter
from serve.engine.backend import BackendRequest
from serve.engine.call import Call, InFlight, Recipient
from serve.engine.codes import code_of
from serve.engine.prompts import Prompts
from serve.engine.rules import ServedRules
from serve.engine.score import ScoreRequest


@dataclass
class FairQueue:
    """Virtual-time fair queueing: when each of a call's requests starts, conversation by
    conversation. A start is a virtual time in tokens: `now` when the call came, and a quantum more
    for each quantum of the call's own tokens before it. What reads a conversation's shared tokens
    starts with the request that computes them, until its own tokens fill a quantum.
    """

    now: int
    quantum: int
    _queued_tokens: int = 0  # own tokens of the call so far
    # conversation -> its start, and the own tokens of those that read it so far
    _shared: dict[Hashable, tuple[int, int]] = field(default_factory=dict)

    def next(self, conversation: Hashable, tokens: int, shared_tokens: int) -> tuple[int, int]:
        """The next request's virtual start, and its own tokens. Its own are those without
        `shared_tokens`, if a request before it computes those of `conversation`.
        """
        if shared_tokens and conversation in self._shared:
            start, readers_tokens = self._shared[conversation]
            own_tokens = tokens - shared_tokens
            self._shared[conversation] = start, readers_tokens + own_tokens
            start += self._whole_quanta(readers_tokens)
        else:
            own_tokens = tokens
            start = self.now + self._whole_quanta(self._queued_tokens)
            if shared_tokens:
                self._shared[conversation] = start, tokens - shared_tokens
        self._queued_tokens += own_tokens
        return start, own_tokens

    def _whole_quanta(self, tokens: int) -> int:
        return tokens // self.quantum * self.quantum


class CallPlan:
    """The prompts of one call: each conversation is tokenised once, and its refusal kept too."""

    def __init__(self, call: Call, rules: ServedRules, prompts: Prompts, queue: FairQueue) -> None:
        self._call = call
        self._rules = rules
        self._prompts = prompts
        self._queue = queue
        # By identity, which is cheap: the requests keep their messages alive.
        self._prefixes: dict[int, list[int] | GuardError] = {}

    def prompts(
        self, requests: Sequence[ScoreRequest], waits: frozenset[str]
    ) -> Iterator[InFlight]:
        """The prompts to submit, conversation by conversation; the others are refused. Within a
        conversation the rules in `waits`, whose adapters are in no slot, come last.
        """
        for indices in self._groups(requests, _order(requests, waits)):
            recipients = []
            for index in indices:
                name = requests[index].adapter
                head = self._rules.head(name)
                recipients.append(Recipient(index, f"rule '{name or 'base'}'", head))
            try:
                in_flight = self._in_flight(requests[indices[0]], tuple(recipients))
            except GuardError as error:
                for recipient in recipients:
                    subject, code = recipient.subject, code_of(error)
                    self._call.refuse(recipient.call_index, subject, str(error), code)
                continue
            yield in_flight

    def _groups(
        self, requests: Sequence[ScoreRequest], order: Sequence[int]
    ) -> Iterator[list[int]]:
        """The indices in this order, grouped: heads that read the same prompt are one group."""
        groups: dict[Hashable, list[int]] = {}
        for index in order:
            request = requests[index]
            key: Hashable = index
            if self._rules.reads_base(request.adapter):
                key = (_conversation(request), request.rule_text)
            groups.setdefault(key, []).append(index)
        yield from groups.values()

    def _in_flight(self, request: ScoreRequest, recipients: tuple[Recipient, ...]) -> InFlight:
        """The next prompt of the call. Raises GuardError if it cannot be judged."""
        serving = self._rules.serving(request.adapter)
        prefix = self._prefix(request.messages)
        if request.is_policy:
            suffix = self._prompts.policy_suffix(request.rule_text, request.cache_salt)
        else:
            suffix = self._prompts.suffix(request.rule_text)
        tokens = len(prefix) + len(suffix)
        self._prompts.check_length(tokens)
        activation_start = 0
        shared_tokens = len(prefix)
        if isinstance(serving, ServableAdapter):
            if serving.shares_conversation:
                activation_start = len(prefix)
            shared_tokens = activation_start
        virtual_start, own_tokens = self._queue.next(_conversation(request), tokens, shared_tokens)
        backend_request = BackendRequest(
            prefix,
            suffix,
            self._rules.loaded(request.adapter),
            activation_start,
            virtual_start,
            request.cache_salt,
            wants_state=recipients[0].head is not None,
        )
        return InFlight(
            self._call, recipients, backend_request, own_tokens, submitted=time.perf_counter()
        )

    def _prefix(self, messages: Sequence[Message]) -> list[int]:
        key = id(messages)
        if key not in self._prefixes:
            try:
                self._prefixes[key] = self._prompts.prefix(messages)
            except GuardError as error:
                self._prefixes[key] = error
        prefix = self._prefixes[key]
        if isinstance(prefix, GuardError):
            raise prefix
        return prefix


def _order(requests: Sequence[ScoreRequest], waits: frozenset[str]) -> Sequence[int]:
    """The indices of the requests, conversation by conversation; in each those in `waits` last."""
    first_index: dict[Hashable, int] = {}
    keys: list[tuple[int, bool]] = []
    for index, request in enumerate(requests):
        first = first_index.setdefault(_conversation(request), index)
        keys.append((first, request.adapter in waits))
    return sorted(range(len(requests)), key=keys.__getitem__)


def _conversation(request: ScoreRequest) -> Hashable:
    """A key that is equal for requests of one call that share keys and values."""
    return id(request.messages), request.cache_salt
