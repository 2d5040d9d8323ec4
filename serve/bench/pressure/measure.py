"""Conversations put to one engine all at once, and put to it again a turn longer.

Knows nothing of reports on disk.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from guard.conversation.example import Message
from guard.prompt.decoder import PromptBuilder
from serve.bench.pressure.work import PressureWork
from serve.bench.scores import scores_of_calls
from serve.bench.workload.prompts import common_tokens, conversation
from serve.engine import GuardEngine, ScoreRequest

ROUNDS = ("new", "again")


@dataclass(frozen=True)
class PressureRound:
    """What was measured while all conversations were put to the engine at once.

    `latencies_ms`: one for each conversation, from the moment when all were submitted.
    """

    verdicts_per_second: float
    latencies_ms: tuple[float, ...]
    computed_tokens: int
    needed_tokens: int
    swap_ins: int


class PressureDriver:
    """An engine and the rules that judge every conversation.

    `adapters`: the adapter's name for each of the rules' texts.
    """

    def __init__(
        self,
        engine: GuardEngine,
        prompts: PromptBuilder,
        texts: Sequence[str],
        adapters: Sequence[str],
    ) -> None:
        self._engine, self._prompts = engine, prompts
        self._rules = list(zip(texts, adapters, strict=True))
        self._suffix_tokens = sum(len(prompts.suffix_ids(text)) for text in texts)

    def run_rounds(self, work: PressureWork, first_seed: int) -> dict[str, PressureRound]:
        """Run both rounds on fresh conversations. Raises GuardError for a refusal."""
        seeds = range(first_seed, first_seed + work.conversations)
        new = [conversation(self._prompts, work.tokens, seed) for seed in seeds]
        turns = [conversation(self._prompts, work.turn_tokens, 7 + seed) for seed in seeds]
        longer = [(*messages, *turn) for messages, turn in zip(new, turns, strict=True)]
        self._engine.forget()
        return {
            "new": self._run_round(new, [()] * work.conversations),
            "again": self._run_round(longer, new),
        }

    def _run_round(
        self, conversations: Sequence[tuple[Message, ...]], seen: Sequence[tuple[Message, ...]]
    ) -> PressureRound:
        """Put all conversations to all rules at once.

        `seen`: what was computed of each conversation before.
        """
        engine = self._engine
        needed = len(conversations) * self._suffix_tokens
        needed += sum(map(self._new_tokens, conversations, seen))
        tokens_before, swap_ins_before = engine.scheduled_tokens, engine.swap_ins
        started = time.perf_counter()
        calls = [engine.submit(self._requests(messages)) for messages in conversations]
        while not all(call.done for call in calls):
            engine.step()
        wall_s = time.perf_counter() - started
        return PressureRound(
            verdicts_per_second=len(scores_of_calls(calls, where="pressure")) / wall_s,
            latencies_ms=tuple(1000 * (call.finished - started) for call in calls),
            computed_tokens=engine.scheduled_tokens - tokens_before,
            needed_tokens=needed,
            swap_ins=engine.swap_ins - swap_ins_before,
        )

    def _requests(self, messages: tuple[Message, ...]) -> list[ScoreRequest]:
        return [ScoreRequest(messages, text, adapter) for text, adapter in self._rules]

    def _new_tokens(self, messages: tuple[Message, ...], seen: tuple[Message, ...]) -> int:
        """The number of tokens behind the beginning that the conversation shares with `seen`."""
        token_ids = self._prompts.prefix_ids(messages)
        if not seen:
            return len(token_ids)
        return len(token_ids) - common_tokens(token_ids, self._prompts.prefix_ids(seen))
