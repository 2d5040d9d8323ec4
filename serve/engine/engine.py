"""The guard engine: one conversation and N rules in, N verdicts out. Knows nothing of HTTP, or of how vLLM works inside.

A conversation is tokenised once, whatever the number of rules, and its tokens are prefilled once with base weights; every rule adds
its own short suffix, and all suffixes run in one batch. What cannot be judged is a `Refusal` for that request and for no other, and
it is never an "allow".
"""

from __future__ import annotations

import contextlib
import difflib
import math
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from guard.card import Card
from guard.errors import GuardError
from guard.example import Message
from guard.layout import ROOT
from guard.recipe import Recipe, ServingMemory
from serve.engine.adapter import Adapter, Requirements
from serve.engine.call import Call, FairQueue, InFlight, OpenCheck
from serve.engine.memory import shared_out, sizes_of
from serve.engine.score import Check, Refusal, Score, ScoreRequest

if TYPE_CHECKING:
    from serve.engine.decoder import Loaded

__all__ = ["Call", "Check", "GuardEngine", "OpenCheck", "Refusal", "Score", "ScoreRequest"]

DEFAULTS: dict[
    str, Any
] = {  # EngineArgs; the recipe's engine section and the caller's overrides come on top
    "enable_lora": True,
    "enable_prefix_caching": True,
    "skip_tokenizer_init": True,  # prompts are token ids, answers are logits
    "disable_log_stats": True,
    "use_tqdm_on_load": False,
    "scheduling_policy": "priority",  # by turns, see `GuardEngine.submit`
    "async_scheduling": False,  # a step ends before the next begins, so what a failed one leaves behind can be cleared away
    "seed": 0,
}

QUANTUM_STEPS = 4  # full steps' tokens of a turn: a rule behind a call of a thousand LoRAs waits for so many steps, not for all
MAX_RESTARTS = 3  # of a request, because an answer is not a number, its own or another's
MAX_SUSPECTED = 2  # restarts because of its own answer
CHARACTERS_PER_TOKEN = 16  # hardly a text has as many: what is longer than this times the context is refused before it is tokenised
PROBE_SLACK = 128  # tokens by which a text that was cut may have more than the whole: what was one word is another
# Our code that decides an answer: a result that is kept names these files among its inputs.
CODE = (
    *(
        ROOT / "serve" / "engine" / name
        for name in ("engine.py", "call.py", "decoder.py", "adapter.py", "score.py")
    ),
    *sorted((ROOT / "serve" / "vllm_alora").rglob("*.py")),
    *(ROOT / "guard" / name for name in ("prompt.py", "text.py", "verdict.py")),
)


class GuardEngine:
    """One base model in vLLM and its adapters, resident or read when they are asked. For one thread; the server runs it in one of its own.

    `adapters` maps names to adapter folders; `merged` is the card of a rule that the base itself answers. `engine_overrides` are vLLM
    EngineArgs and win over the recipe's, its memory included; of the recipe's `lora_target_modules` only those are prepared that one of
    `adapters` has, because each takes room in every slot. Raises GuardError if a folder is not servable (found before the engine starts)
    or vLLM cannot start or load it.
    """

    def __init__(
        self,
        recipe: Recipe,
        adapters: Mapping[str, Path],
        *,
        merged: Card | None = None,
        **engine_overrides: Any,
    ) -> None:
        args = DEFAULTS | {
            "model": recipe.base_path,
            "revision": recipe.commit,
            "dtype": recipe.dtype,
        }
        args |= {"max_model_len": recipe.context_tokens} | recipe.engine | engine_overrides
        self._requirements = Requirements.of(recipe, args.get("max_lora_rank"))
        admitted = [self._requirements.admit(name, folder) for name, folder in adapters.items()]
        if "lora_target_modules" not in engine_overrides:
            args |= _prepared(args, admitted)
        self._prepared = frozenset(args.get("lora_target_modules") or ())
        if recipe.serving_memory != ServingMemory():
            sizes = sizes_of(recipe, args.get("max_lora_rank", 16), args.get("lora_target_modules"))
            places = recipe.engine.get("max_loras")
            args = (
                shared_out(
                    recipe.serving_memory, sizes, len(adapters), args["max_model_len"], places
                )
                | args
            )
        # What falls out of host memory is read again from its folder; if that has changed since, the request is refused.
        args["max_cpu_loras"] = max(
            args.get("max_cpu_loras", len(adapters)), args.get("max_loras", 1)
        )
        self._context_tokens: int = args["max_model_len"]
        self._slots: int = args.get("max_loras", 1)
        self._prompts = self._requirements.prompts
        self._merged = {} if merged is None else {merged.rule: merged}
        self._adapters: dict[str, tuple[Adapter, Loaded]] = {}
        self._suffixes: dict[
            str, list[int]
        ] = {}  # rule text -> its token ids: few, and the same for every conversation
        self._in_flight: dict[str, InFlight] = {}
        self._clock = 0  # of the turns: the own tokens of what has been answered, refused, or cancelled when its turn had come
        self.is_usable = True  # False once a failed batch could not be cleared away: nothing is answered any more

        from serve.engine.decoder import (
            Core,
        )  # imports vLLM, and only now are the inputs known to be good

        self._core = Core(args, self._prompts.yes_id, self._prompts.no_id)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.close)
            for adapter in admitted:
                self._load(adapter)
            on_failure.pop_all()

    @property
    def rules(self) -> Mapping[str, Card]:
        """The cards of what is served, by name."""
        return self._merged | {name: adapter.card for name, (adapter, _) in self._adapters.items()}

    @property
    def step_ms(self) -> float:
        """Time spent inside vLLM's steps since the start: what is left of a wall time is tokenising and queueing."""
        return self._core.step_s * 1000

    @property
    def block_size(self) -> int:
        """Tokens of one block of the prefix cache."""
        return self._core.block_size

    @property
    def cache_tokens(self) -> int:
        """Tokens whose keys and values the cache holds."""
        return self._core.cache_tokens

    @property
    def scheduled_tokens(self) -> int:
        """Tokens computed since the start, those that were computed again included."""
        return self._core.scheduled_tokens

    @property
    def swap_ins(self) -> int:
        """How often an adapter was copied into a slot since the start: more than there are adapters, where there are fewer slots."""
        return self._core.swap_ins

    @property
    def adapter_loads(self) -> int:
        """How often an adapter was read from disk since the start: more than there are adapters, where host memory holds fewer."""
        return self._core.adapter_loads

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score | Refusal]:
        """One outcome per request, in order: any mixture of conversations, rules and adapters in one engine."""
        asked = self.submit(requests)
        with self._cancelling(asked):
            while not asked.done:
                self.step()
        return asked.results()

    def submit(self, requests: Sequence[ScoreRequest]) -> Call:
        """Queue all requests without waiting; those that cannot be queued are refused at once. `step` answers them.

        In turns of QUANTUM_STEPS steps' tokens: of a long call some are answered, then what others have asked meanwhile. Turns are numbered by
        the tokens answered and those that the call has asked before, so that nobody waits for ever. The rules of one conversation come
        in the turn in which it is computed, as many as fill one: what it computed need not stay for later. Of them those come first whose
        adapter is in a slot.
        """
        self._check_usable()
        asked = Call([None] * len(requests))
        prefixes: dict[
            int, list[int] | GuardError
        ] = {}  # by identity, which is cheap: the requests keep their messages alive
        turns = FairQueue(self._clock, QUANTUM_STEPS * self._core.step_tokens)
        try:
            for place in self._order(requests):
                request = requests[place]
                try:
                    in_flight = self._prepare(request, prefixes, asked, turns)
                except GuardError as error:
                    asked.refuse(place, _rule(request.adapter), str(error))
                    continue
                self._submit(in_flight, place, time.perf_counter())
        except BaseException:
            self.cancel(asked)
            raise
        return asked

    def check(
        self,
        messages: Sequence[Message],
        rules: Sequence[str] | None = None,
        *,
        cache_salt: str | None = None,
    ) -> Check:
        """Put one conversation to `rules` (default: all that are served). Raises GuardError if there is no rule, or one twice.

        Conversations of different `cache_salt` share no keys and values, so that the time and the token counts of one tell nothing of
        another.
        """
        under_way = self.open_check(messages, rules, cache_salt=cache_salt)
        with self._cancelling(under_way.asked):
            while not under_way.asked.done:
                self.step()
        return under_way.result()

    def open_check(
        self,
        messages: Sequence[Message],
        rules: Sequence[str] | None = None,
        *,
        cache_salt: str | None = None,
    ) -> OpenCheck:
        """Start a check without waiting: several may be under way at once, driven by `step`. Raises as `check` does."""
        names = tuple(self.rules if rules is None else rules)
        if not names:
            raise GuardError(
                "there is no rule to check",
                remedy="Name one of the engine's rules, or leave them out to ask all",
            )  # and no verdict either: an empty check must not read as "allow"
        if len(set(names)) < len(names):
            raise GuardError("a rule is named twice", got=", ".join(names), remedy="Name each once")
        cards, conversation = self.rules, tuple(messages)
        texts = {name: cards[name].rule_text if name in cards else "" for name in names}
        asked = self.submit(
            [ScoreRequest(conversation, texts[name], name, cache_salt) for name in names]
        )
        return OpenCheck(
            names, {name: cards[name].calibration for name in names if name in cards}, asked
        )

    def step(self) -> None:
        """Run one batch and hand its answers to those who asked. If it fails, everything in flight is dropped.

        After an answer that is not a number, it and what is still in flight begin again: they may have read the same broken keys and
        values, each other's or a neighbour's. An answer that is not a number for the third time is a refusal.
        """
        self._check_usable()
        try:
            readings = self._core.step()
        except BaseException:  # Ctrl+C too
            self._recover()
            raise
        for adapter_id, error in self._core.unreadable().items():
            self._refuse_adapter(adapter_id, error)
        suspects: dict[str, int] = {}
        for reading in readings:
            request = self._in_flight.get(reading.request_id)
            if request and request.no_numbers < MAX_SUSPECTED and not math.isfinite(reading.logit):
                suspects[reading.request_id] = reading.computed_tokens
            elif request:
                del self._in_flight[reading.request_id]
                self._clock += request.own_tokens
                request.asked.settle(reading)
        if not all(math.isfinite(reading.logit) for reading in readings):
            self._start_over(suspects)

    def cancel(self, asked: Call) -> None:
        """Drop what is in flight of `asked`. What may have begun counts as answered: else who always cancels would be first for ever."""
        begun = sum(
            request.own_tokens
            for request in map(self._in_flight.get, asked.waiting)
            if request and request.turn <= self._clock
        )
        self._drop(asked)
        self._clock += begun

    def add(self, name: str, folder: Path) -> None:
        """Serve one more adapter. Raises GuardError as the constructor does, or if the name is taken."""
        if name in self._adapters:
            raise GuardError(
                "an adapter of this name is served already", got=name, remedy="Remove it first"
            )
        adapter = self._requirements.admit(name, folder)
        if self._prepared and (missing := adapter.modules - self._prepared):
            what, remedy = (
                "the engine was started without adapters of these layers",
                "Start it with this one, or give lora_target_modules",
            )
            raise GuardError(what, where=folder, got=", ".join(sorted(missing)), remedy=remedy)
        self._load(adapter)

    def pin(self, name: str) -> None:
        """Let the adapter be the last to leave its slot, however seldom it is asked. Raises GuardError if it is not served."""
        _, loaded = self._served(name)
        self._core.pin(loaded)

    def remove(self, name: str) -> None:
        """Stop serving an adapter. Raises GuardError if it is not served or anything is in flight."""
        if self._in_flight:
            remedy = "Wait for them, or cancel them"
            raise GuardError(
                "an adapter cannot be removed while requests are in flight", got=name, remedy=remedy
            )
        _, loaded = self._served(name)
        self._core.unload(loaded)
        del self._adapters[name]

    def forget(self) -> None:
        """Empty the prefix cache, as if no conversation had been seen. Raises GuardError while requests are in flight."""
        self._core.forget()

    def close(self) -> None:
        """Give the engine's memory back; the process may then start another."""
        self._core.close()

    def __enter__(self) -> GuardEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refuse_adapter(self, adapter_id: int, error: Exception) -> None:
        """Refuse what is in flight for an adapter that could not be read again."""
        for request_id, request in list(self._in_flight.items()):
            if request.loaded is not None and request.loaded.request.lora_int_id == adapter_id:
                self._core.cancel([request_id])
                del self._in_flight[request_id]
                self._clock += request.own_tokens
                place, _ = request.asked.waiting.pop(request_id)
                request.asked.refuse(
                    place,
                    request.name,
                    f"the adapter cannot be read: {error}. Train it again, or restore its folder",
                )

    def _drop(self, asked: Call) -> None:
        self._core.cancel(asked.waiting)
        for request_id in asked.waiting:
            self._in_flight.pop(request_id, None)
        asked.waiting.clear()

    def _recover(self) -> None:
        """Leave nothing of a failed batch behind; if that fails, the engine is of no more use.

        vLLM enters a batch's blocks into its prefix cache before it computes them, and leaves them there when it does not. And a key or
        value that is not a number spreads from a block that was freed to whom it is given next, even from slots that are masked out.
        """
        self.is_usable = False
        for asked in {
            id(request.asked): request.asked for request in self._in_flight.values()
        }.values():
            self._drop(asked)
        self._core.scrub()
        self.is_usable = True

    def _start_over(self, suspects: Mapping[str, int]) -> None:
        """Leave nothing of this batch behind, and submit again what is in flight: first those that have given no answer yet.

        Then the `suspects`, those that computed the fewest tokens first: the others have what it computed of the conversation from the
        first, whose own numbers may have got into it, so that another one is the first now.
        """
        in_flight = sorted(self._in_flight.items(), key=lambda item: suspects.get(item[0], -1))
        waiting = [
            (request, *request.asked.waiting[request_id]) for request_id, request in in_flight
        ]
        last = 1 + max((request.turn for request, _, _ in waiting), default=0)
        self._recover()
        for (request, place, submitted), (request_id, _) in zip(waiting, in_flight, strict=True):
            if request.restarts < MAX_RESTARTS:
                is_suspect = request_id in suspects
                again = replace(
                    request,
                    restarts=request.restarts + 1,
                    no_numbers=request.no_numbers + is_suspect,
                )
                self._submit(
                    replace(again, turn=last if is_suspect else request.turn), place, submitted
                )
            else:
                self._clock += request.own_tokens
                request.asked.refuse(
                    place,
                    "batch",
                    "requests of its batch gave no number, time and again. Ask again",
                )

    def _check_usable(self) -> None:
        if not self.is_usable:
            raise GuardError(
                "the engine failed and could not be cleared, so its answers could be wrong",
                remedy="Start it again",
            )

    def _load(self, adapter: Adapter) -> None:
        # The name is part of the key of cached KV blocks; with the weights' hash in it, other weights never meet old blocks.
        loaded = self._core.load(
            f"{adapter.name}@{adapter.card.weights_sha256[:16]}", adapter.folder
        )
        if (
            self._requirements.admit(adapter.name, adapter.folder) != adapter
        ):  # weights of one training, calibration of another
            self._core.unload(loaded)
            raise GuardError(
                "the adapter was replaced while it was loaded",
                where=adapter.folder,
                remedy="Try again",
            )
        self._adapters[adapter.name] = (adapter, loaded)

    def _served(self, name: str) -> tuple[Adapter, Loaded]:
        if name not in self._adapters:
            near = difflib.get_close_matches(name, self._adapters, n=1)
            raise GuardError(
                f"rule '{name}' is not served",
                remedy=f"Did you mean '{near[0]}'?" if near else "See the engine's rules",
            )
        return self._adapters[name]

    def _order(self, requests: Sequence[ScoreRequest]) -> Sequence[int]:
        """The places of the requests, conversation by conversation; of one conversation, those whose adapter is in a slot first."""
        in_slots = self._core.in_slots() if len(self._adapters) > self._slots else None
        place_of: dict[Hashable, int] = {}
        for place, request in enumerate(requests):
            place_of.setdefault(_conversation(request), place)

        def key(place: int) -> tuple[int, bool]:
            known = self._adapters.get(requests[place].adapter or "")
            waits = (
                in_slots is not None
                and known is not None
                and known[1].request.lora_int_id not in in_slots
            )
            return place_of[_conversation(requests[place])], waits

        return sorted(range(len(requests)), key=key)

    def _prepare(
        self,
        request: ScoreRequest,
        prefixes: dict[int, list[int] | GuardError],
        asked: Call,
        turns: FairQueue,
    ) -> InFlight:
        """What to submit for one request, the next of its call's `turns`."""
        named = None if request.adapter in self._merged else request.adapter
        adapter, loaded = (None, None) if named is None else self._served(named)
        token_ids, rule_turn = self._prompt(request, prefixes)
        activation_start = rule_turn if adapter and adapter.card.method == "alora" else 0
        shared_tokens = rule_turn if adapter is None else activation_start
        turn, own_tokens = turns.next(_conversation(request), len(token_ids), shared_tokens)
        return InFlight(
            asked,
            _rule(request.adapter),
            token_ids,
            loaded,
            activation_start,
            request.cache_salt,
            own_tokens,
            turn,
        )

    def _submit(self, request: InFlight, place: int, submitted: float) -> None:
        """Queue one request, the one at `place` of those that were asked with it, or refuse it if vLLM does."""
        try:
            request_id = self._core.submit(
                request.token_ids,
                request.loaded,
                request.activation_start,
                turn=request.turn,
                cache_salt=request.cache_salt,
            )
        except GuardError as error:
            self._clock += request.own_tokens
            request.asked.refuse(place, request.name, str(error))
        else:
            request.asked.waiting[request_id] = (place, submitted)
            self._in_flight[request_id] = request

    def _prompt(
        self, request: ScoreRequest, prefixes: dict[int, list[int] | GuardError]
    ) -> tuple[list[int], int]:
        """The prompt's token ids, and where its suffix starts: the conversation's are made once per call, a rule's once per engine."""
        key = id(request.messages)
        if key not in prefixes:
            try:
                prefixes[key] = self._prefix(request.messages)
            except GuardError as error:
                prefixes[key] = error
        prefix = prefixes[key]
        if isinstance(prefix, GuardError):
            raise prefix
        if request.rule_text not in self._suffixes:
            self._suffixes[request.rule_text] = self._prompts.suffix_ids(request.rule_text)
        token_ids = prefix + self._suffixes[request.rule_text]
        if len(token_ids) + 1 > self._context_tokens:
            raise self._too_long(f"{len(token_ids) + 1:,} tokens")
        return token_ids, len(prefix)

    def _prefix(self, messages: Sequence[Message]) -> list[int]:
        if not messages:
            raise GuardError(
                "there is no conversation to judge", remedy="Give at least one message"
            )
        if (
            characters := sum(len(message.content) for message in messages)
        ) > CHARACTERS_PER_TOKEN * self._context_tokens:
            raise self._too_long(f"{characters:,} characters")
        for message in messages:
            self._probe(message)
        return self._prompts.prefix_ids(messages)

    def _probe(self, message: Message) -> None:
        """Refuse a long text after tokenising as much of it as is too long, not all of it."""
        length = self._context_tokens
        while length < len(message.content):
            tokens = len(self._prompts.turn_ids(replace(message, content=message.content[:length])))
            if tokens > self._context_tokens + PROBE_SLACK:
                raise self._too_long(f"more than {tokens:,} tokens")
            length *= 2

    def _too_long(self, got: str) -> GuardError:
        what = "the prompt does not fit the context and is never cut"
        return GuardError(
            what, got=got, remedy=f"Shorten it to fit {self._context_tokens:,} tokens"
        )

    @contextlib.contextmanager
    def _cancelling(self, asked: Call) -> Iterator[None]:
        """Leave nothing of `asked` in flight, whatever happens: a later call must not meet the answers of an earlier one."""
        try:
            yield
        finally:
            self.cancel(asked)


def _prepared(args: Mapping[str, Any], adapters: Sequence[Adapter]) -> dict[str, Any]:
    """Of the layers that slots would be prepared for, those that an adapter has; all of them where it is not known, or there is none."""
    known = args.get("lora_target_modules") or ()
    found = [name for name in known if any(name in adapter.modules for adapter in adapters)]
    return (
        {"lora_target_modules": found}
        if found and all(adapter.modules for adapter in adapters)
        else {}
    )


def _conversation(request: ScoreRequest) -> Hashable:
    """Equal for requests of one call that share keys and values; by identity, which is cheap: the requests keep their messages alive."""
    return id(request.messages), request.cache_salt


def _rule(adapter: str | None) -> str:
    return f"rule '{adapter or 'base'}'"
