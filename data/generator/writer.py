"""One group: a contrast pair of conversations from its dimensions.

The two conversations share every dimension and every utterance except the judged speaker's in the
target, which violates the rule in one and does not in the other. What the other speaker says there
belongs to both acts: the phrase book names it in the `before` or `after` of each, or it is the
allowed act itself, which the violating act names. So no answer misses its question. Where the
allowed conversation never touches the rule (`UNRELATED`), its whole target exchange is another one,
and so is the transition around it. No line of the books stands twice in a conversation.

Of a rule on the last turn (`turns: last`) both conversations end with the turn in which they
differ, and what violates the rule may stand before it in both, as a hard negative.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from data.generator import grammar
from data.generator.dimensions import SEVERITIES, SHORTEST, UNRELATED, Dimensions, TargetPosition
from data.generator.exchange import Exchange, Exchanges, Turn, count_tokens
from data.generator.phrasebook import STRATA, Corpus, Phrasebook, Pool
from data.generator.registers import ASSISTANT_REGISTERS, USER_REGISTERS
from data.generator.tricks import TRICKS
from guard.conversation.example import GENERATOR, Example, Message, Split
from guard.errors import GuardError

WORDINGS = 8  # tries for a pair of targets whose lengths agree and fit
# Tokens by which the two targets of a pair may differ before another wording is tried.
CLOSE_ENOUGH = 3

Targets = tuple[Exchange, Exchange]  # in which a group's conversations differ: violating, allowed


@dataclass(frozen=True)
class Frame:
    """What both conversations of a group share."""

    system: str | None
    exchanges: tuple[Exchange, ...]
    hard_negatives: tuple[str, ...]
    distractors: tuple[str, ...]

    def around(self, target: Exchange, position: TargetPosition) -> list[Exchange]:
        """The frame's exchanges with the target at its position."""
        late = len(self.exchanges)
        index = {"early": 0, "middle": late // 2, "late": late}[position]
        return [*self.exchanges[:index], target, *self.exchanges[index:]]


class Writer:
    """Writes the conversations of one rule from one pool of phrases."""

    def __init__(self, corpus: Corpus, pool: Pool) -> None:
        self.corpus, self.pool = corpus, pool
        self.exchanges = Exchanges(corpus, pool)
        self._is_on_last_turn = corpus.rule.turns == "last"
        # The books of other rules whose acts may stand in this one's conversations.
        self._borrowed = corpus.borrowed
        if corpus.rule.depends_on_context:
            self._borrowed = ()

    def group(self, dimensions: Dimensions, split: Split, key: str) -> list[Example]:
        if self._is_on_last_turn:
            dimensions = replace(dimensions, position="late")
        rng = random.Random(key)
        targets = self._targets(dimensions, key, rng)
        frame = self._frame(dimensions, targets, key, rng)
        is_unanswered = _may_be_unanswered(dimensions, targets, frame) and rng.random() < 0.3
        acts = (dimensions.violating_act, dimensions.allowed_act)
        examples = []
        for label, act, target in zip((1, 0), acts, targets, strict=True):
            place = min(targets[0].act_index, len(target.turns) - 1)  # of the violating act
            left_out = int(is_unanswered)  # turns at the end
            if self._is_on_last_turn:
                left_out = len(target.turns) - 1 - place
            exchanges = frame.around(target, dimensions.position)
            messages = self._messages(dimensions, frame, exchanges, target.turns[place], key)
            example = Example(
                id=f"{key}/{label}",
                rule=self.corpus.rule.id,
                messages=messages[: len(messages) - left_out],
                label=label,
                split=split,
                source=GENERATOR,
                group=key,
                meta=self._meta(dimensions, frame, exchanges, act, target, left_out),
            )
            examples.append(example)
        return examples

    def _meta(
        self,
        dimensions: Dimensions,
        frame: Frame,
        exchanges: Sequence[Exchange],
        act: str,
        target: Exchange,
        left_out: int,
    ) -> dict[str, Any]:
        """What a conversation was made from; `acts` has one entry a message."""
        turns = list(itertools.chain.from_iterable(exchange.turns for exchange in exchanges))
        turns = turns[: len(turns) - left_out]
        acts = [turn.act for turn in turns]
        if frame.system:
            acts = [None, *acts]
        performed = [turn for turn in turns if turn.core]
        around = target.turns  # the act was written for its answer, even if that is left out
        if self._is_on_last_turn:
            around = around[: len(around) - left_out]
        return {
            **asdict(dimensions),
            "stratum": STRATA[self.pool],
            "difficulty": dimensions.difficulty,
            "act": act,
            "stance": "unrelated" if act == UNRELATED else self.corpus.book.acts[act].stance,
            "context": next((turn.source for turn in around if turn.source != act), ""),
            "acts": acts,
            "cores": [turn.core for turn in performed],
            "phrasings": [turn.phrasing for turn in performed],
            "hard_negative_acts": list(frame.hard_negatives),
            "distractor_acts": list(frame.distractors),
        }

    def _targets(self, dimensions: Dimensions, key: str, rng: random.Random) -> Targets:
        """The two exchanges, chosen among several wordings so that their lengths agree and fit."""
        write = self._contrast
        if dimensions.allowed_act == UNRELATED:
            write = self._unrelated
        tried: list[tuple[int, Targets]] = []
        while len(tried) < WORDINGS:
            targets = write(dimensions, key, rng)
            tried.append((self._misfit(targets, dimensions), targets))
            if tried[-1][0] <= CLOSE_ENOUGH:
                break
        return min(tried, key=lambda wording: wording[0])[1]

    def _contrast(self, dimensions: Dimensions, key: str, rng: random.Random) -> Targets:
        """Both acts around the same words of the other speaker."""
        book, terse = self.corpus.book, _is_terse(dimensions)
        severity = dimensions.severity
        violating_act = book.acts[dimensions.violating_act]
        is_same_speaker = violating_act.speaker == book.acts[dimensions.allowed_act].speaker
        context: tuple[str, ...] = ()
        if is_same_speaker:
            context = book.shared(dimensions.violating_act, dimensions.allowed_act)
        allowed = self.exchanges.act(
            book, dimensions.allowed_act, severity, key, rng, terse=terse, context=context
        )
        if allowed is None:  # no line of the context drawn supplies the act's words
            for name in dict.fromkeys(context):
                allowed = allowed or self.exchanges.act(
                    book, dimensions.allowed_act, severity, key, rng, terse=terse, context=(name,)
                )
        if allowed is None:
            raise self._nothing_supplied(dimensions)
        index = allowed.act_index
        if not is_same_speaker:
            # The allowed act is what the other speaker says: the violating one takes the first turn
            # of its own speaker there.
            roles = [turn.role for turn in allowed.turns]
            index = roles.index(violating_act.speaker)
        around = allowed.surroundings(index)
        violating = self.exchanges.act(
            book, dimensions.violating_act, severity, key, rng, terse=terse, around=around
        )
        assert violating is not None  # nothing is taken yet
        return violating, allowed

    def _nothing_supplied(self, dimensions: Dimensions) -> GuardError:
        book, name = self.corpus.book, dimensions.allowed_act
        contexts = ", ".join(book.shared(dimensions.violating_act, name))
        problem = f"acts.{name}: no line supplies what its cores repeat"
        where = f"data/generator/phrases/{book.rule}.yaml"
        got = f"{contexts} ({self.pool})"
        remedy = f"Add lines with the slots {', '.join(book.acts[name].supplied)}"
        return GuardError(problem, where=where, got=got, remedy=remedy)

    def _unrelated(self, dimensions: Dimensions, key: str, rng: random.Random) -> Targets:
        """The violating exchange, and what stands there in a conversation without the rule."""
        severity, terse = dimensions.severity, _is_terse(dimensions)
        violating = self.exchanges.act(
            self.corpus.book, dimensions.violating_act, severity, key, rng, terse=terse
        )
        assert violating is not None  # nothing is taken yet
        allowed: Exchange | None = None
        if self._borrowed and rng.random() < 0.5:
            book = rng.choice(self._borrowed)
            allowed = self.exchanges.act(book, rng.choice(list(book.acts)), severity, key, rng)
        if allowed is None:  # also where no line of the pool supplies what the act repeats
            allowed = self.exchanges.everyday(dimensions.domain, 1, f"{key}/unrelated", rng)[0]
        return violating, allowed

    def _frame(
        self, dimensions: Dimensions, targets: Targets, key: str, rng: random.Random
    ) -> Frame:
        taken = targets[0].lines | targets[1].lines
        room = dimensions.target_tokens - _total_tokens(targets) // 2
        system = None
        if dimensions.has_system:
            system = self.exchanges.system(f"{key}/system", rng)
            room -= count_tokens(system)
        chosen: list[Exchange] = []
        acts: list[tuple[str, str]] = []
        for number, (book, act) in enumerate(self._acts_around(dimensions, rng)):
            severity = rng.choice(SEVERITIES[:2])
            exchange = self.exchanges.act(book, act, severity, f"{key}/{number}", rng, taken=taken)
            if exchange is not None and exchange.tokens <= room:
                chosen.append(exchange)
                acts.append((book.rule, act))
                taken |= exchange.lines
                room -= exchange.tokens
        rng.shuffle(chosen)
        everyday = self._everyday(dimensions.domain, room, key, rng, taken)
        filled = dimensions.target_tokens - room + _total_tokens(everyday)
        if filled < 1.1 * SHORTEST:
            taken = taken.union(*(exchange.lines for exchange in everyday))
            everyday += self.exchanges.everyday(dimensions.domain, 1, f"{key}/more", rng, taken)
        merged = list(everyday)
        for exchange in chosen:
            merged.insert(rng.randint(0, len(merged)), exchange)
        rule_id = self.corpus.rule.id
        return Frame(
            system,
            tuple(merged),
            tuple(act for rule, act in acts if rule == rule_id),
            tuple(f"{rule}/{act}" for rule, act in acts if rule != rule_id),
        )

    def _acts_around(
        self, dimensions: Dimensions, rng: random.Random
    ) -> list[tuple[Phrasebook, str]]:
        rule_acts = self.corpus.acts(violating=False)
        if self._is_on_last_turn:
            rule_acts += self.corpus.acts(violating=True)
        acts = [(self.corpus.book, rng.choice(rule_acts)) for _ in range(dimensions.hard_negatives)]
        if self._borrowed:
            books = [rng.choice(self._borrowed) for _ in range(dimensions.distractors)]
            acts += [(book, rng.choice(list(book.acts))) for book in books]
        return acts

    def _everyday(
        self, domain: str, room: int, key: str, rng: random.Random, taken: set[str]
    ) -> list[Exchange]:
        domains: Iterable[str] = self.corpus.background.domains
        if self.corpus.rule.depends_on_context:  # its conversations keep to its own domains
            domains = self.corpus.book.domains
        foreign = [name for name in domains if name != domain]
        rng.shuffle(foreign)
        written: list[Exchange] = []
        taken = set(taken)
        for name in (domain, *foreign):
            candidates = self.exchanges.everyday(name, rng.randint(4, 7), key, rng, taken)
            if room > 25 and rng.random() < 0.4:
                candidates += self.exchanges.thanks(f"{key}/thanks/{name}", rng, taken)
            for exchange in candidates:
                if exchange.tokens <= room + 10 and (written or exchange.topic != "thanks"):
                    written.append(exchange)
                    taken |= exchange.lines
                    room -= exchange.tokens
            if room < 25:
                break
        return written

    def _messages(
        self,
        dimensions: Dimensions,
        frame: Frame,
        exchanges: Sequence[Exchange],
        tricked: Turn,
        key: str,
    ) -> tuple[Message, ...]:
        messages = []
        if frame.system:
            messages.append(Message("system", grammar.tidy(frame.system)))
        topic = exchanges[0].topic
        for number, exchange in enumerate(exchanges):
            changes_topic = exchange.topic not in (topic, "thanks")
            topic = exchange.topic
            for index, turn in enumerate(exchange.turns):
                # One generator per turn, so that a pair's shared turns come out the same.
                rng = random.Random(f"{key}/{number}/{index}")
                text = turn.text
                if index == 0 and changes_topic and rng.random() < 0.5:
                    transition = rng.choice(self.corpus.background.transitions)
                    text = f"{grammar.resolve(transition, rng)} {text}"
                text = _in_register(text, turn.role, dimensions, rng)
                if dimensions.trick and turn is tricked:
                    text = TRICKS[dimensions.trick](text, rng, self.pool)
                messages.append(Message(turn.role, text))
        return tuple(messages)

    def _misfit(self, targets: Targets, dimensions: Dimensions) -> int:
        """The tokens by which the targets differ, and by which the longer one exceeds the
        conversation. Of a rule on the last turn only the last turns differ.
        """
        lengths = [target.tokens for target in targets]
        if self._is_on_last_turn:
            lengths = [count_tokens(target.act_turn.text) for target in targets]
        excess = max(0, max(lengths) - dimensions.target_tokens)
        return max(lengths) - min(lengths) + excess


def _may_be_unanswered(dimensions: Dimensions, targets: Targets, frame: Frame) -> bool:
    """Whether a long group, whose targets come last, may end with the judged turn."""
    return (
        dimensions.target_tokens > 2 * SHORTEST
        and (dimensions.position == "late" or not frame.exchanges)
        and dimensions.allowed_act != UNRELATED
        and all(target.act_index == len(target.turns) - 2 for target in targets)
    )


def _total_tokens(exchanges: Iterable[Exchange]) -> int:
    return sum(exchange.tokens for exchange in exchanges)


def _is_terse(dimensions: Dimensions) -> bool:
    return dimensions.user_register == "terse" or dimensions.target_tokens < 70


def _in_register(text: str, role: str, dimensions: Dimensions, rng: random.Random) -> str:
    """A user's or an assistant's words, tidied and in their register; a tool's output as it is."""
    if role == "user":
        return USER_REGISTERS[dimensions.user_register](grammar.tidy(text), rng)
    if role == "assistant":
        return ASSISTANT_REGISTERS[dimensions.assistant_register](grammar.tidy(text), rng)
    return text
