"""Checks as every wire format asks for them, and what their verdicts mean together.

Knows nothing of any format, nor of what answers: an engine of this process (`engine_service.py`),
or those of others (`serve/cluster/service.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Self

from fastapi import Request
from starlette.exceptions import HTTPException

from guard.conversation.chat import says_nothing, unread_parts
from guard.conversation.example import Message
from guard.errors import GuardError
from guard.weights.card import Card, read_card
from serve.api.access import Caller
from serve.api.catalogue import Catalogue
from serve.api.errors import Undecided, Unjudged
from serve.api.input.limits import TEXTS_AT_ONCE
from serve.api.keeping import CheckKeeper
from serve.api.observe.record import CheckRecord, ContentHasher, Observer, Purpose, StreamRecord
from serve.api.observe.traffic import Counted, Traffic
from serve.api.rollouts import Assignment, SettledCheck
from serve.api.session import SESSION_HEADER, conversation_key
from serve.engine import Check, Refusal
from serve.engine.codes import code_of
from serve.engine.engine import policy_name
from serve.engine.refusals import too_late
from serve.policy.logic import Decision
from serve.policy.rule_set import RuleSet
from serve.policy.ruling import Ruling
from serve.registry.change import PreparedChange, RolloutChange
from serve.registry.gate import TrialGate
from serve.registry.history import RuleHistory
from serve.registry.rollout import SHOWN_DIGITS, Rollout, TakenBack
from serve.registry.source import RolloutSource

log = logging.getLogger(__name__)

NOTHING_SAID = "there is no text to judge"
POLL_S = 0.5  # how often a check looks whether its caller is still connected


class DecidedCheck(NamedTuple):
    """The verdicts of a check, and what they mean together."""

    check: Check
    decision: Decision

    @property
    def violated(self) -> list[str]:
        return [verdict.rule for verdict in self.check.verdicts if verdict.violates]


class SeveralChecks(NamedTuple):
    """The checks that were answered, in order, and the first error of those that were not."""

    answered: list[DecidedCheck]
    failure: Exception | None = None

    def all(self) -> list[DecidedCheck]:
        """A check for each conversation. Raises the failure if there is one."""
        if self.failure is not None:
            raise self.failure
        return self.answered


@dataclass(frozen=True)
class Question:
    """What conversations are put to: a rule set, and `metadata` that its conditions read. Of the
    set's rules those among the `policies` are no rules, but texts that the request states.

    Conversations of different `cache_salt` share nothing in the cache. `within` is the conversation
    that a part of one is of.
    """

    rule_set: RuleSet
    metadata: Mapping[str, str] | None = None
    cache_salt: str | None = None
    purpose: Purpose = "answer"
    within: Sequence[Message] | None = None
    policies: Mapping[str, str] = field(default_factory=dict)


class CheckService(ABC):
    """Puts conversations to rules, and tells the observers of each check when it is over."""

    def __init__(
        self,
        cards: Mapping[str, Card],
        observers: Sequence[Observer] = (),
        source: RolloutSource | None = None,
        keeper: CheckKeeper | None = None,
    ) -> None:
        self.cards = cards
        self.keeper = keeper
        self.rollouts: dict[str, Rollout] = {}  # what of each rule is served
        self.traffic = Traffic()
        self._observers = (*observers, self.traffic)
        self._source = source or RolloutSource()
        self._gates: dict[tuple[str, int], TrialGate] = {}  # by the trials
        self.taken_back: dict[tuple[str, int], TakenBack] = {}  # by the trials that are over
        self._noting: set[asyncio.Task[None]] = set()
        self._deciding = asyncio.Lock()  # one decision after the other

    @classmethod
    def of(cls, request: Request) -> Self:
        service: Self = request.app.state.service
        return service

    @abstractmethod
    def text_tokens(self, text: str) -> int: ...

    @abstractmethod
    def wanted(self, rule: str) -> Rollout:
        """What of a rule is to be served now. Raises GuardError if it has no folder."""

    @abstractmethod
    async def watch_trials(self) -> None:
        """Take back what others who judge here have taken back."""

    @abstractmethod
    async def is_ready(self) -> bool:
        """Whether one more check would be taken."""

    async def counted(self) -> Counted:
        """What was counted of the versions, by all who judge here."""
        return self.traffic.counted()

    @abstractmethod
    async def serve(self, rule: str, *, as_before: bool = False) -> Card:
        """Serve a rule as it is to be served now; the card of its champion. `as_before`: as it is
        served, without a trial that is over.

        Checks under way end as they began. Raises HTTPException 404 for a rule that is neither
        served nor trained, and GuardError, with all as before, if its weights cannot be served.
        """

    @abstractmethod
    async def remove(self, rule: str) -> Card:
        """Stop serving a rule; the card that it had. Checks under way end with it. Raises
        HTTPException 409 for one that must stay, and GuardError for what cannot be removed.
        """

    @abstractmethod
    async def _answer(
        self,
        request: Request,
        messages: Sequence[Message],
        rules: Sequence[str],
        cache_salt: str | None,
        policies: Sequence[str] = (),
    ) -> Check:
        """The verdicts of these rules and policies, under the caller's own cache salt. Raises as
        `check`.
        """

    async def history(self, rule: str) -> RuleHistory:
        """The versions and events of a rule that is served."""
        return await asyncio.to_thread(self._source.history, self.cards[rule])

    def unserved(self) -> dict[str, int]:
        """`RolloutSource.unserved`, of what is served now."""
        return self._source.unserved(list(self.cards))

    async def decide(self, rule: str, change: RolloutChange) -> tuple[PreparedChange, int]:
        """Record what a person decides about a rule that is served, and serve it, unless it has too
        few approvals; how many it has.

        Raises Undecided, with all as before, for what the registry refuses, and GuardError for what
        cannot be served.
        """
        async with self._deciding:
            try:
                served = self.cards[rule]
                prepared = await asyncio.to_thread(self._source.prepare, served, change)
                approvals = await asyncio.to_thread(prepared.carry_out)
            except GuardError as error:
                raise Undecided(error) from error
            if approvals >= prepared.approvals:
                await self._serve_decided(rule, prepared)
            return prepared, approvals

    async def _serve_decided(self, rule: str, prepared: PreparedChange) -> None:
        try:
            await self.serve(rule)
            await self.watch_trials()
        except Exception:
            await asyncio.to_thread(prepared.undo, "it could not be served")
            with contextlib.suppress(GuardError):  # an earlier trial goes on as a new one
                await self.serve(rule)
            raise
        if prepared.begins_trial and self.without_taken_back(self.rollouts[rule]).trial is None:
            raise GuardError("it cannot be served beside the champion, and is taken back", got=rule)

    def close(self) -> None:
        for observer in self._observers:
            observer.close()
        if self.keeper is not None:
            self.keeper.close()

    async def adopt(self) -> None:
        """Serve every rule as it is to be served; the log says what cannot be."""
        for rule, rollout in list(self.rollouts.items()):
            try:
                if await asyncio.to_thread(self.wanted, rule) != rollout:
                    await self.serve(rule)
            except GuardError as error:
                log.error("the rule %s is not served as it is to be: %s", rule, error)

    async def check(
        self, request: Request, messages: Sequence[Message], question: Question
    ) -> DecidedCheck:
        """Put a conversation to the question, as long as the sender of `request` waits.

        Raises HTTPException 413 for more characters than the caller may send, and GuardError if
        there is no verdict at all: too much work, too late, a failed batch. Where nothing is said
        no rule has a verdict.
        """
        caller = Caller.of(request)
        caller.check_size([messages], question.policies.values())
        rules = question.rule_set.rules
        facts = replace(request.scope["facts"], tenant=caller.tenant and caller.tenant.name)
        cards = _served(caller.catalogue, rules)
        record = CheckRecord(
            facts,
            question.rule_set,
            cards,
            time.time(),
            purpose=question.purpose,
            content_hash=self._content_hash(messages),
            policies=self._policy_hashes(question),
        )
        clock = time.perf_counter()  # from before the wait for room
        try:
            async with _room(request):
                # Another version may answer by now.
                record = replace(record, cards=_served(caller.catalogue, rules))
                if says_nothing(messages):  # no engine is asked
                    refusal = Refusal("conversation", NOTHING_SAID, "nothing_said")
                    settled = SettledCheck(Check((), dict.fromkeys(rules, refusal), 0, 0, 0.0))
                else:
                    settled = await self._judged(request, messages, question)
            check = _without_internals(settled.check)
        except BaseException as error:
            self._tell(replace(record, failure=code_of(error)), clock)
            raise
        decision = question.rule_set.decide(rulings_of(check), question.metadata or {})
        decided_by = [name for name in decision.decided_by if name not in check.undecided]
        decision = decision._replace(decided_by=tuple(decided_by))
        others = [*_served(caller.catalogue, rules).values(), *self._trial_cards(settled)]
        record = replace(
            record, check=check, decision=decision, said=settled.said, other_cards=others
        )
        self._learn(self._tell(record, clock), messages, settled.conversation)
        return DecidedCheck(check, decision)

    def _content_hash(self, messages: Sequence[Message]) -> str:
        """The hash of the observer that has a key; empty without one."""
        for observer in self._observers:
            if isinstance(observer, ContentHasher):
                return observer.content_hash(messages)
        return ""

    def _policy_hashes(self, question: Question) -> dict[str, str]:
        """The hash of each policy that is asked, as of a conversation of these words alone."""
        hashes: dict[str, str] = {}
        for name in question.rule_set.rules:
            if name in question.policies:
                hashes[name] = self._content_hash([Message("system", question.policies[name])])
        return hashes

    def _trial_cards(self, settled: SettledCheck) -> list[Card]:
        """The cards of the versions on trial that judged."""
        cards: list[Card] = []
        for said in settled.said:
            rollout = self.rollouts.get(said.rule)
            if said.is_trial and rollout is not None and rollout.trial is not None:
                with contextlib.suppress(GuardError):  # its folder is gone
                    cards.append(_card_in(rollout.trial.folder, rollout.trial.version))
        return cards

    def tell_stream(self, record: StreamRecord) -> None:
        """Tell the observers of a stream that is over."""
        for observer in self._observers:
            observer.streamed(record)

    async def _judged(
        self, request: Request, messages: Sequence[Message], question: Question
    ) -> SettledCheck:
        """What the versions say that are to judge the conversation now."""
        caller, rules = Caller.of(request), question.rule_set.rules
        rollouts: dict[str, Rollout] = {}  # of the rules of which not all is enforced
        for rule in rules:
            rollout = self.rollouts.get(rule)
            if rollout is not None and rollout.is_on_trial:
                rollouts[rule] = self.without_taken_back(rollout)
        if not rollouts and self.keeper is None:
            return SettledCheck(await self._answered(request, messages, rules, question))
        session = request.headers.get(SESSION_HEADER, "")
        tenant = caller.tenant.name if caller.tenant else ""
        within = question.within or messages
        key = conversation_key(within, question.cache_salt, session, tenant)
        is_answer = question.purpose == "answer"
        asked = Assignment(rollouts, rules, key, is_answer=is_answer)
        check = Check((), {}, 0, 0, 0.0)
        if names := asked.names:
            check = await self._answered(request, messages, names, question)
        return asked.settled(check)

    async def _answered(
        self,
        request: Request,
        messages: Sequence[Message],
        names: Sequence[str],
        question: Question,
    ) -> Check:
        """The verdicts that the rule set takes. Raises as `check`."""
        check = await self._asked(request, messages, names, question)
        if question.rule_set.unseen_language == "unjudged":
            check = check.without_unseen_languages()
        return check

    async def _asked(
        self,
        request: Request,
        messages: Sequence[Message],
        names: Sequence[str],
        question: Question,
    ) -> Check:
        """The answers by these names. An engine names the policies of each check anew."""
        if not question.policies:
            return await self._answer(request, messages, names, question.cache_salt)
        stated = [name for name in names if name in question.policies]
        texts = [question.policies[name] for name in stated]
        rules = [name for name in names if name not in question.policies]
        check = await self._answer(request, messages, rules, question.cache_salt, texts)
        return check.renamed({policy_name(index): name for index, name in enumerate(stated)})

    async def tried(
        self, request: Request, messages: Sequence[Message], names: Sequence[str]
    ) -> Check:
        """What versions say, by the engine's names for them. Nobody's answer, so no observer is
        told of it. Raises as `check`.
        """
        return _without_internals(await self._answer(request, messages, names, None))

    def without_taken_back(self, rollout: Rollout) -> Rollout:
        """The rollout without a trial that is over."""
        if rollout.trial is not None and rollout.trial.key in self.taken_back:
            return rollout.model_copy(update={"trial": None})
        return rollout

    def _learn(self, record: CheckRecord, messages: Sequence[Message], conversation: str) -> None:
        """Let gates and reviewers know of an answer; `conversation` is its key."""
        if record.purpose == "answer":
            self._watch_trials(record, conversation)
            if self.keeper is not None:
                self.keeper.saw(record, messages, conversation)

    def _watch_trials(self, record: CheckRecord, conversation: str) -> None:
        """Take back what a version's gate takes back."""
        for said, champion in record.trials():
            rollout = self.rollouts.get(said.rule)
            if rollout is None or rollout.trial is None or rollout.trial.version != said.version:
                continue
            trial = rollout.trial
            if trial.key not in self._gates:
                self._gates[trial.key] = TrialGate(trial.gate)
            gate = self._gates[trial.key]
            flagged = (champion.violates, said.violates)
            if reason := gate.saw(conversation, *flagged, record.latency_s):
                self.take_back(TakenBack(said.rule, trial, reason))

    def take_back(self, over: TakenBack) -> None:
        """Ask the trial nothing more; note that it is over, and have it unloaded."""
        if over.trial.key not in self.taken_back:
            self.taken_back[over.trial.key] = over
            self._gates.pop(over.trial.key, None)
            name = over.trial.version[:SHOWN_DIGITS]
            log.warning("%s of %s is taken back: %s", name, over.rule, over.reason)
            task = asyncio.create_task(self._note(over))
            self._noting.add(task)
            task.add_done_callback(self._noting.discard)

    async def _note(self, over: TakenBack) -> None:
        rule, trial = over.rule, over.trial
        try:
            await asyncio.to_thread(self._source.abort, self.cards[rule], trial, over.reason)
        except Exception:  # it is asked nothing more; a server that starts later would ask it
            log.exception("that a trial of %s is over could not be noted", rule)
        try:
            await self.serve(rule, as_before=True)
        except Exception:
            log.exception("a trial of %s that is over could not be unloaded", rule)

    def _tell(self, record: CheckRecord, clock: float) -> CheckRecord:
        """Tell the observers of a check that began at `clock`, by time.perf_counter."""
        record = replace(record, latency_s=time.perf_counter() - clock)
        for observer in self._observers:
            observer.checked(record)
        return record

    async def check_each(
        self, request: Request, conversations: Sequence[Sequence[Message]], question: Question
    ) -> SeveralChecks:
        """A check for each conversation, TEXTS_AT_ONCE at a time. After a failure none is begun any
        more, and those under way end. Raises HTTPException 413 as `check`.
        """
        Caller.of(request).check_size(conversations, question.policies.values())
        room = asyncio.Semaphore(TEXTS_AT_ONCE)
        failures: list[Exception] = []

        async def check_one(messages: Sequence[Message]) -> DecidedCheck | None:
            async with room:
                if failures:
                    return None
                try:
                    return await self.check(request, messages, question)
                except Exception as failure:
                    failures.append(failure)
                    return None

        checks = await asyncio.gather(*(check_one(messages) for messages in conversations))
        answered = [check for check in checks if check is not None]
        return SeveralChecks(answered, next(iter(failures), None))

    async def check_sent(
        self, request: Request, call_id: str | None, sent: tuple[Message, ...], question: Question
    ) -> list[str]:
        """The rules by which what is sent to a model is a violation. Raises as `violated`.

        It is kept for its reply, if one may come: where it is let pass, and also where the engine
        fails, the caller does not wait, or a picture keeps it from being judged, since a gateway
        may be told to let that pass. What is too long to be judged is not kept.
        """
        calls, salt = Caller.of(request).calls, question.cache_salt
        try:
            rules = violated(await self.check_each(request, [sent], question))
        except (GuardError, Unjudged, asyncio.CancelledError) as error:
            if call_id and (not isinstance(error, Unjudged) or unread_parts(sent)):
                calls.keep(call_id, sent, salt)
            raise
        if call_id and not rules:
            calls.keep(call_id, sent, salt)
        return rules

    async def judge_each(
        self, request: Request, conversations: Sequence[Sequence[Message]], question: Question
    ) -> list[DecidedCheck]:
        """`check_each`, where every rule has a verdict, else Unjudged is raised."""
        checks = (await self.check_each(request, conversations, question)).all()
        for number, (check, decision) in enumerate(checks, start=1):
            if check.refused or decision.ruling is Ruling.UNJUDGED:
                raise _unjudged(check, decision, number, len(checks))
        return checks


def not_trained(rule: str, cards: Mapping[str, Card]) -> HTTPException:
    """Status 404 for a rule without weights that can be served beside those of `cards`, with the
    commands that would train some. A merged base answers what it was started with.
    """
    commands: dict[str, None] = {}
    for card in cards.values():
        if card.merged_revision is None:
            commands[f"`make train RULE={rule} MODEL={card.model} METHOD={card.method}`"] = None
    if not commands:
        alone = "the merged base here answers what it was started with"
        return HTTPException(404, f"the rule {rule!r} is not served: {alone}")
    command = ", ".join(commands)
    if len(commands) > 1:
        command = f"one of {command}"
    problem = f"the rule {rule!r} is not served, and not trained for what is served"
    return HTTPException(404, f"{problem}; {command} trains it")


def violated(several: SeveralChecks) -> list[str]:
    """The rules by which any check that was answered is a violation, also where another one failed.

    If none is one, raises the failure, or Unjudged if one is unjudged.
    """
    rules: dict[str, None] = {}
    for decided in several.answered:
        decision = decided.decision
        if decision.ruling is Ruling.VIOLATION:
            decisive = [rule for rule in decided.violated if rule in decision.decided_by]
            # Where a violation rests on no violated rule, whatever it does rest on.
            rules |= dict.fromkeys(decisive or decision.decided_by)
    if rules:
        return list(rules)
    checks = several.all()
    for number, (check, decision) in enumerate(checks, start=1):
        if decision.ruling is Ruling.UNJUDGED:
            raise _unjudged(check, decision, number, len(checks))
    return []


def _unjudged(check: Check, decision: Decision, number: int, texts: int) -> Unjudged:
    """How many rules of the check have no verdict, and why the first of them has none; where all
    have one, the metadata that are missing. Of several texts it says which one it was.
    """
    of_text = ""
    if texts > 1:
        of_text = f"text {number} of {texts}: "
    for rule, refusal in check.refused.items():
        rules = len(check.verdicts) + len(check.refused)
        why = f"{of_text}{len(check.refused)} of {rules} rules; {rule}: {refusal.why}"
        return Unjudged(why, refusal.code)
    missing = f"{of_text}the request does not state {', '.join(decision.decided_by)}"
    return Unjudged(missing, "metadata_missing")


@asynccontextmanager
async def _room(request: Request) -> AsyncIterator[None]:
    """The caller's place in the engine, waited for as long as the request may take; or TooLate."""
    async with AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(request.scope["deadline"] - time.monotonic()):
                await stack.enter_async_context(Caller.of(request).room)
        except TimeoutError:
            raise too_late() from None
        yield


@functools.lru_cache
def _card_in(folder: Path, version: str) -> Card:
    """The card of a version, read once."""
    return read_card(folder)


def _served(catalogue: Catalogue, rules: Sequence[str]) -> dict[str, Card]:
    """The cards of the rules, without those that are removed by now."""
    cards = catalogue.rules
    return {rule: cards[rule] for rule in rules if rule in cards}


def _without_internals(check: Check) -> Check:
    """The check with reasons that tell a caller nothing of this machine."""
    refused = {}
    for rule, refusal in check.refused.items():
        refused[rule] = refusal
        if refusal.is_internal:
            log.error("the rule %s could not be judged: %s", rule, refusal)
            why = "what answers it cannot be used now; the server's log says why"
            refused[rule] = Refusal(refusal.subject, why, refusal.code)
    return replace(check, refused=refused)


def rulings_of(check: Check) -> dict[str, Ruling]:
    rulings = dict.fromkeys(check.undecided, Ruling.ALLOW)
    rulings |= dict.fromkeys(check.refused, Ruling.UNJUDGED)
    for verdict in check.verdicts:
        rulings[verdict.rule] = Ruling(verdict.word)
    return rulings
