"""What is on its way through the engine, and what has come back; not how it gets there."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from guard.coverage import ConversationForm
from guard.errors import GuardError
from guard.verdict import Calibration, Verdict
from serve.engine.backend import BackendRequest, EngineOutput
from serve.engine.codes import Code
from serve.engine.head import CountedTexts, HeadInput, ServableHead
from serve.engine.score import Check, Refusal, Score


@dataclass
class Call:
    """Requests on their way through the engine, and their outcomes, in the order of the requests.
    `waiting` holds what the backend computes for them, by the backend's request ids; `counted` the
    words that heads have read.
    """

    outcomes: list[Score | Refusal | None]
    waiting: dict[str, InFlight] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)
    finished: float = 0.0
    counted: CountedTexts = field(default_factory=CountedTexts)

    @property
    def done(self) -> bool:
        return not self.waiting

    def settle(self, output: EngineOutput, logits: Sequence[float]) -> None:
        """Turn an output into the outcomes that wait for it, by its logit for each of them. One
        that is NaN or infinite is no answer. Where several heads read one output, its computed
        tokens count once, with the first of them; for the others the whole prompt counts as cached.
        """
        in_flight = self.waiting.pop(output.request_id)
        self.finished = time.perf_counter()
        latency_ms = (self.finished - in_flight.submitted) * 1000
        cached, computed = output.cached_tokens, output.computed_tokens
        for recipient, logit in zip(in_flight.recipients, logits, strict=True):
            if math.isfinite(logit):
                self.outcomes[recipient.call_index] = Score(logit, cached, computed, latency_ms)
            else:
                why = f"the logit is {logit}: the adapter or the base is numerically broken."
                self.refuse(
                    recipient.call_index, "verdict", f"{why} Train the adapter again", "nan"
                )
            cached, computed = cached + computed, 0

    def refuse(
        self, index: int, subject: str, why: str, code: Code, *, is_internal: bool = False
    ) -> None:
        self.finished = time.perf_counter()
        self.outcomes[index] = Refusal(subject, why, code, is_internal)

    def results(self) -> list[Score | Refusal]:
        """One outcome per request. Raises GuardError in flight, or if the batch failed."""
        settled = [outcome for outcome in self.outcomes if outcome is not None]
        if len(settled) < len(self.outcomes):
            problem = "requests are still in flight, or their batch failed"
            got = f"{len(settled)} of {len(self.outcomes)} outcomes"
            remedy = "Retry; the log has the batch's error"
            raise GuardError(problem, got=got, remedy=remedy)
        return settled


class Recipient(NamedTuple):
    """A request that an output answers: its index in its call, its rule, and its head, if any."""

    call_index: int
    subject: str
    head: ServableHead | None = None


class InFlight(NamedTuple):
    """A prompt in the backend, and whom its output answers: one request, or several heads.
    `own_tokens` is the prompt's length, less the conversation where an earlier prompt of the same
    call computes it: virtual time advances by them when it is answered. `submitted` is by
    time.perf_counter, and stays as it was when it begins again. `restarts` counts how often it
    began again, `nan_answers` how often because of its own answer.
    """

    call: Call
    recipients: tuple[Recipient, ...]
    request: BackendRequest
    own_tokens: int
    submitted: float
    restarts: int = 0
    nan_answers: int = 0

    def logits(self, output: EngineOutput) -> list[float]:
        """What the output says to each recipient, in nats; NaN if it says nothing."""
        heads = [recipient.head for recipient in self.recipients if recipient.head is not None]
        if not heads:
            return [output.logit] * len(self.recipients)
        read = HeadInput(output, self.request.prefix, self.call.counted)
        return [head.logit(read) for head in heads]

    def refuse(self, why: str, code: Code, subject: str | None = None) -> None:
        """Refuse every recipient, for what the backend found, of `subject` or its own rule."""
        for recipient in self.recipients:
            about = subject or recipient.subject
            self.call.refuse(recipient.call_index, about, why, code, is_internal=True)


@dataclass(frozen=True)
class OpenCheck:
    """A check under way: what `GuardEngine.open_check` starts, `step` drives and `result` ends.
    `calibrations`, `versions` and `by` are those of the rules' cards when it was opened. `unread`
    is what of the conversation no rule can read: a rule that finds no violation in the rest has no
    verdict.
    `form` is what coverage asks of the conversation; without it a verdict counts as covered.
    """

    rules: tuple[str, ...]
    calibrations: Mapping[str, Calibration]
    call: Call
    versions: Mapping[str, str] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    form: ConversationForm | None = None
    by: Mapping[str, str] = field(default_factory=dict)

    def result(self) -> Check:
        """The finished check. Raises GuardError unless it is `call.done`."""
        partly_read: Refusal | None = None
        if self.unread:
            why = f"{self.unread[0]}, which no rule reads"
            partly_read = Refusal("conversation", why, "unread_content")
        scores: dict[str, Score] = {}
        refused: dict[str, Refusal] = {}
        verdicts: list[Verdict] = []
        for rule, outcome in zip(self.rules, self.call.results(), strict=True):
            if isinstance(outcome, Refusal):
                refused[rule] = outcome
                continue
            scores[rule] = outcome
            verdict = self.calibrations[rule].verdict(rule, outcome.logit, self.form)
            verdict = verdict._replace(by=self.by.get(rule, ""))
            if partly_read is not None and not verdict.violates:
                refused[rule] = partly_read
            else:
                verdicts.append(verdict)
        return Check(
            verdicts=tuple(verdicts),
            refused=refused,
            cached_tokens=sum(score.cached_tokens for score in scores.values()),
            computed_tokens=sum(score.computed_tokens for score in scores.values()),
            wall_ms=(self.call.finished - self.call.started) * 1000,
            versions={rule: self.versions[rule] for rule in scores if rule in self.versions},
            latencies_ms={rule: score.latency_ms for rule, score in scores.items()},
        )
