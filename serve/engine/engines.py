"""The guard engines of a process, each with its own base: one check may ask rules of all of them.

So a rule on an encoder and a rule on a decoder answer together. Each engine steps by itself, one
after the other. Engines that are dead are started again, with the same bases and rules. Knows
nothing of threads or HTTP, nor of what computes.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from guard.arguments import names_listed
from guard.conversation.example import Message
from guard.errors import GuardError
from guard.weights.card import Card, check_rule, load_card, read_card
from serve.engine.adapter import Requirements
from serve.engine.call import Call, OpenCheck
from serve.engine.engine import TEST_CONVERSATION, GuardEngine
from serve.engine.refusals import Overloaded, not_served, without_frames
from serve.engine.score import Check, EngineCounters, joined

log = logging.getLogger(__name__)

# Starts the engines; the folders are those that rules were last served from, by name; None at
# first.
StartEngines = Callable[[Mapping[str, Path] | None], Sequence[GuardEngine]]


class OpenedCheck(Protocol):
    """A check under way, of one engine or of several."""

    @property
    def call(self) -> Any:
        """The call, for `cancel`; `done` says whether nothing of it is in flight."""
        ...

    def result(self) -> Check:
        """The finished check."""
        ...


class CheckEngine(Protocol):
    """What the server needs of an engine, or of several."""

    @property
    def rules(self) -> Mapping[str, Card]:
        """The cards of what is served, by name."""
        ...

    @property
    def is_usable(self) -> bool:
        """False once nothing more is answered."""
        ...

    @property
    def counters(self) -> EngineCounters:
        """The figures of what it holds and has done."""
        ...

    def text_tokens(self, text: str) -> int:
        """How many tokens a text has; from any thread."""
        ...

    def open_check(
        self,
        messages: Sequence[Message],
        rules: Sequence[str] | None = None,
        *,
        cache_salt: str | None = None,
    ) -> OpenedCheck:
        """Start a check without waiting."""
        ...

    def serve(self, name: str, folder: Path | None = None) -> None:
        """Serve a new rule, or one by other weights."""
        ...

    def remove(self, name: str) -> None:
        """Stop serving a rule."""
        ...

    def folder(self, name: str) -> Path:
        """Where a rule's weights are."""
        ...

    def step(self) -> None:
        """Run one batch of what is in flight."""
        ...

    def cancel(self, call: Any) -> None:
        """Drop the requests of a check that are in flight."""
        ...


@dataclass(frozen=True)
class SharedCall:
    """A check's calls, each with its engine."""

    parts: tuple[tuple[GuardEngine, Call], ...]

    @property
    def done(self) -> bool:
        """Whether nothing is in flight any longer."""
        return all(call.done for _, call in self.parts)


@dataclass(frozen=True)
class SharedCheck:
    """A check under way in the engines of its rules, which are in the order asked."""

    rules: tuple[str, ...]
    checks: tuple[OpenCheck, ...]
    call: SharedCall

    def result(self) -> Check:
        """The finished check, verdicts and refusals in the order of the rules. Raises GuardError
        unless it is `call.done`.
        """
        if len(self.checks) == 1:
            return self.checks[0].result()
        check = joined(self.rules, [part.result() for part in self.checks])
        finished = max(part.call.finished for part in self.checks)
        started = min(part.call.started for part in self.checks)
        return replace(check, wall_ms=(finished - started) * 1000)


class GuardEngines:
    """The engines that `start` starts: now, and again by `restart`.

    Raises what it raises, and GuardError where two engines serve a rule of one name. Between two
    starts there is no engine: rules and folders are those of the dead ones, and whatever needs an
    engine is Overloaded.
    """

    def __init__(self, start: StartEngines) -> None:
        self._start = start
        self._engines = _distinct(start(None))
        self._cards: dict[str, Card] = {}  # of the dead engines, as are the folders
        self._folders: dict[str, Path] = {}
        # What the engines so far demanded of folders, by model.
        self._requirements: dict[str, Requirements] = {}
        self._left_out: dict[str, Path] = {}  # of rules that the living engines could not serve

    @property
    def rules(self) -> Mapping[str, Card]:
        """The cards of what is served, by name, engine by engine."""
        cards: dict[str, Card] = {}
        engines = self._engines
        for engine in engines:
            cards |= engine.rules
        return cards if engines else self._cards

    @property
    def is_usable(self) -> bool:
        """Whether all engines are there and answer: a check may ask any of them."""
        engines = self._engines
        return bool(engines) and all(engine.is_usable for engine in engines)

    @property
    def counters(self) -> EngineCounters:
        """The counters of all engines together, since they were last started."""
        return sum((engine.counters for engine in self._living()), EngineCounters())

    def text_tokens(self, text: str) -> int:
        """As `GuardEngine.text_tokens`, where the text has most."""
        return max(engine.text_tokens(text) for engine in self._living())

    def check(
        self,
        messages: Sequence[Message],
        rules: Sequence[str] | None = None,
        *,
        cache_salt: str | None = None,
    ) -> Check:
        """Put one conversation to `rules`, by default all; as `GuardEngine.check`."""
        open_check = self.open_check(messages, rules, cache_salt=cache_salt)
        try:
            while not open_check.call.done:
                self.step()
        finally:
            self.cancel(open_check.call)
        return open_check.result()

    def open_check(
        self,
        messages: Sequence[Message],
        rules: Sequence[str] | None = None,
        *,
        cache_salt: str | None = None,
    ) -> SharedCheck:
        """Start a check without waiting. Raises as `GuardEngine.check` does.

        A rule that none serves is the first engine's to refuse.
        """
        engines = self._living()
        names = names_listed(self.rules if rules is None else rules, "rules")
        serving = self._serving()
        by_engine: dict[int, list[str]] = {}
        for name in names:
            by_engine.setdefault(serving.get(name, 0), []).append(name)
        checks: list[OpenCheck] = []
        parts: list[tuple[GuardEngine, Call]] = []
        try:
            for index, served in by_engine.items() or [(0, [])]:
                engine = engines[index]
                checks.append(engine.open_check(messages, served, cache_salt=cache_salt))
                parts.append((engine, checks[-1].call))
        except BaseException:
            self.cancel(SharedCall(tuple(parts)))
            raise
        return SharedCheck(names, tuple(checks), SharedCall(tuple(parts)))

    def step(self) -> None:
        """Run one batch in every engine that has something in flight."""
        for engine in self._living():
            if engine.is_busy:
                engine.step()

    def cancel(self, call: SharedCall) -> None:
        """Drop the requests of `call` that are in flight."""
        for engine, part in call.parts:
            engine.cancel(part)

    def forget(self) -> None:
        """Empty the prefix caches. Raises GuardError while requests are in flight."""
        for engine in self._living():
            engine.forget()

    def serve(self, name: str, folder: Path | None = None) -> None:
        """As `GuardEngine.serve`, in the engine that serves the rule, or one of its card's base;
        also a rule that was left out.

        Raises GuardError for a new rule of another base, too.
        """
        folder = folder or self._left_out.get(name)
        engine = self._engine(name)
        if name not in engine.rules and folder is not None and len(self._engines) > 1:
            bases = {engine.model: engine.base for engine in self._engines}
            model = model_of(load_card(folder), folder, bases)
            engine = {engine.model: engine for engine in self._engines}[model]
        engine.serve(name, folder)
        self._left_out.pop(name, None)

    def remove(self, name: str) -> None:
        """As `GuardEngine.remove`, also for a rule that was left out."""
        if self._left_out.pop(name, None) is None:
            self._engine(name).remove(name)

    def folder(self, name: str) -> Path:
        """As `GuardEngine.folder`."""
        if self._engines and name not in self._left_out:
            return self._engine(name).folder(name)
        if name not in self._folders:
            raise not_served(name)
        return self._folders[name]

    def works(self) -> bool:
        """Whether every base still answers a check, by one rule or another, with nothing in
        flight.
        """
        return all(_answers(engine) for engine in self._living())

    def restart(self, on_load: Callable[[], None] = lambda: None) -> None:
        """Close the engines and start others: every rule from the folder that served it last, by
        the weights that are there now. `on_load` is called before each try, and before each rule
        that is loaded by itself.

        If they do not start so, rules whose files cannot be served are left out (`_selections`),
        and those among them that can be served beside the rest are added. Raises GuardError if they
        do not start with any selection, and what adding a rule raises if an engine is dead of it;
        it may be tried again.
        """
        self._bury()
        started = self._start_with_most(on_load)
        self._left_out = {
            rule: folder for rule, folder in self._folders.items() if rule not in started
        }
        for rule, folder in list(self._left_out.items()):
            on_load()
            self._add_or_leave_out(rule, folder)

    def close(self) -> None:
        """Give the memory of all engines back, also where closing one raises."""
        engines, self._engines = self._engines, ()
        _close_all(engines)

    def __enter__(self) -> GuardEngines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _living(self) -> tuple[GuardEngine, ...]:
        engines = self._engines
        if not engines:
            raise Overloaded("the engine is down", remedy="Try again in a few seconds")
        return engines

    def _engine(self, name: str) -> GuardEngine:
        """The engine that serves a rule; the first where none does."""
        return self._living()[self._serving().get(name, 0)]

    def _serving(self) -> dict[str, int]:
        """The index of each rule's engine; an engine makes its rules anew when it is asked."""
        indices: dict[str, int] = {}
        for index, engine in enumerate(self._engines):
            indices |= dict.fromkeys(engine.rules, index)
        return indices

    def _bury(self) -> None:
        """Remember what the dead engines served, and give their memory back as far as that goes."""
        engines = self._engines
        if not engines:
            return
        self._cards = dict(self.rules)
        self._folders = dict(self._left_out)
        for engine in engines:
            self._folders |= _folders(engine)
            self._requirements[engine.model] = engine.requirements
        self._engines = ()
        try:
            _close_all(engines)
        except Exception:  # they are dead: whatever that raises, others are started
            log.exception("a dead engine could not be closed")

    def _start_with_most(self, on_load: Callable[[], None]) -> Mapping[str, Path]:
        """Start engines of the first selection that they start with, and return that. Raises
        GuardError if there is none.
        """
        failure: GuardError | None = None
        for folders in self._selections():
            if failure is not None:
                log.error("the engine is started with fewer rules, since: %s", failure)
            on_load()
            failure = self._start_with(folders)
            if failure is None:
                return folders
        assert failure is not None  # all folders have been tried
        raise failure

    def _start_with(self, folders: Mapping[str, Path]) -> GuardError | None:
        """Start engines of these folders; the error if they do not start, without what that start
        had in memory.
        """
        gc.collect()  # of the dead engines, or of a start that failed, only circles are left
        try:
            self._engines = _distinct(self._start(folders))
        except GuardError as error:
            return without_frames(error)
        except Exception as error:  # vLLM's, of a broken device for example
            problem = f"the engine cannot be started again: {error}"
            return GuardError(problem, remedy="Start the process again")
        return None

    def _selections(self) -> Iterator[dict[str, Path]]:
        """The folders to start with, fewer each time: all; those that would be admitted; of these
        those that have the weights and cards of the dead engines.
        """
        yield self._folders
        sound: dict[str, Path] = {}
        unchanged: dict[str, Path] = {}
        for rule, folder in self._folders.items():
            card = self._admitted_card(rule, folder)
            if card is not None:
                sound[rule] = folder
            if card is not None and card == self._cards.get(rule):
                unchanged[rule] = folder
        if 0 < len(sound) < len(self._folders):
            yield sound
        if 0 < len(unchanged) < len(sound):
            yield unchanged

    def _admitted_card(self, rule: str, folder: Path) -> Card | None:
        """The card of the folder; None if no engine like those so far would admit it."""
        for requirements in self._requirements.values():
            with contextlib.suppress(GuardError, OSError):
                card = requirements.admit(rule, folder).card
                check_rule(card, rule, folder)
                return card
        return None

    def _add_or_leave_out(self, rule: str, folder: Path) -> None:
        """Serve a rule beside the others; the log says why if that fails. Raises what it raises if
        an engine is dead of it.
        """
        try:
            check_rule(read_card(folder), rule, folder)
            self.serve(rule)
        except Exception as error:  # vLLM's, too
            if not self.is_usable:
                raise
            if isinstance(error, GuardError):
                log.error("the rule %s is left out: %s", rule, error)
            else:  # its words may quote a value
                log.exception("the rule %s is left out", rule)


def model_of(card: Card, folder: Path, bases: Mapping[str, tuple[str, str]]) -> str:
    """The served model on the base of the weights; if there are several, the card's own.

    `bases`: model -> its base and that base's revision. Raises GuardError if none has it.
    """
    base = (card.base, card.base_revision)
    models = [model for model, base_of_model in bases.items() if base_of_model == base]
    if not models:
        got = f"{card.base} {card.base_revision[:12]}"
        remedy = f"Served here: {', '.join(bases)}"
        problem = "the base of these weights is not served"
        raise GuardError(problem, where=folder, got=got, remedy=remedy)
    return card.model if card.model in models else models[0]


def _distinct(engines: Sequence[GuardEngine]) -> tuple[GuardEngine, ...]:
    """The engines. Closes them and raises GuardError if two serve a rule of one name."""
    names = [name for engine in engines for name in engine.rules]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        _close_all(engines)
        remedy = "Leave it out of one of them"
        raise GuardError("two engines serve one rule", got=", ".join(twice), remedy=remedy)
    return tuple(engines)


def _close_all(engines: Sequence[GuardEngine]) -> None:
    """Close all, also where closing one raises."""
    with contextlib.ExitStack() as closing:
        for engine in engines:
            closing.callback(engine.close)


def _folders(engine: GuardEngine) -> dict[str, Path]:
    """The folder of each rule's weights, except a rule that the base itself answers."""
    folders: dict[str, Path] = {}
    for name in engine.rules:
        with contextlib.suppress(GuardError):
            folders[name] = engine.folder(name)
    return folders


def _answers(engine: GuardEngine) -> bool:
    """Whether a conversation can be put to the first rule, or else to the last; without a rule
    there is nothing to answer.
    """
    names = tuple(engine.rules)
    if not names:
        return True
    for name in dict.fromkeys((names[0], names[-1])):
        try:
            refused = engine.check(TEST_CONVERSATION, [name]).refused
        except Exception as error:
            log.error("the engine does not answer %s: %s", name, error)
            continue
        if not refused:
            return True
        log.error("the engine does not answer %s: %s", name, refused[name].why)
    return False
