"""The guard engine: one conversation and N rules in, N verdicts out. Knows nothing of HTTP; what
computes is a `Backend`. A conversation is tokenised once and prefilled once with base weights;
every adapter adds its own short suffix, and all suffixes run in one batch. Heads that read the same
suffix are one request. What cannot be judged is a `Refusal` for that request and for no other, and
never an "allow".
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from guard.arguments import names_listed
from guard.conversation.chat import unread_parts
from guard.conversation.example import Message
from guard.coverage import ConversationForm
from guard.errors import GuardError
from guard.home import ROOT
from guard.recipe import Recipe
from guard.weights.card import Card
from guard.weights.version_zero import card_of_base, card_of_reader
from serve.engine.adapter import READER, Requirements, ServableAdapter
from serve.engine.backend import Loaded
from serve.engine.backends.arguments import stated_args
from serve.engine.backends.start import STARTS, StartBackend
from serve.engine.call import Call, OpenCheck
from serve.engine.dispatch import Dispatcher
from serve.engine.head import CountedTexts
from serve.engine.plan import CallPlan
from serve.engine.prompts import Prompts
from serve.engine.rules import ServedRules, part_of_base, reads_exact_states
from serve.engine.score import Check, EngineCounters, Refusal, Score, ScoreRequest

log = logging.getLogger(__name__)

GUARD_CODE = (
    *("method.py", "rule.py", "verdict.py"),
    *("weights/card.py", "weights/head.py", "weights/version_zero.py"),
    *("base_files.py", "recipe.py", "machine/device.py"),  # base, dtype; whether it is compiled
)


def _code() -> tuple[Path, ...]:
    """Our code that decides an answer, which a kept result names among its inputs. The engine's
    thread decides when an answer comes and not what it says.
    """
    engine = set((ROOT / "serve" / "engine").rglob("*.py"))
    engine -= set((ROOT / "serve" / "engine" / "thread").rglob("*.py"))
    seams = set((ROOT / "serve" / "vllm_alora").rglob("*.py"))
    seams |= set((ROOT / "serve" / "vllm_alora").rglob("*.cpp"))
    seams |= set((ROOT / "serve" / "vllm_encoder").rglob("*.py"))
    guard = {ROOT / "guard" / name for name in GUARD_CODE}
    guard |= set((ROOT / "guard" / "prompt").glob("*.py"))
    return tuple(sorted(engine | seams | guard))


CODE = _code()
POLICIES = "policies"  # in the card by which what is no rule's is judged
CANDIDATE = " (new)"  # behind the name of a rule whose new weights are tested
TEST_CONVERSATION = (Message("user", "Hello"), Message("assistant", "Hello, how can I help?"))


def policy_name(number: int) -> str:
    """What a policy of a check is called, by its place: no rule is called so."""
    return f"#{number}"


class GuardEngine:
    """One base model and the adapters and heads on it. For one thread. `model` is the recipe's
    name, `base` the base and its revision as the cards name them, `requirements` what is demanded
    of folders, `backend` what computes, `policies` the card by which what is no rule's is judged,
    None on an encoder and a merged base. `folders` maps names to adapter and head folders. `merged`
    is the card of a rule that the base itself answers; `reader` the folder of what judges policies
    that are no rule's, else the base does. `engine_overrides` are vLLM EngineArgs and
    win over the recipe's; `start_backend` starts what computes, by default that of the recipe's
    kind. Raises GuardError if a folder is not servable or is of the merged rule (found before the
    backend starts), or if the backend cannot start or load it.
    """

    def __init__(
        self,
        recipe: Recipe,
        folders: Mapping[str, Path],
        *,
        merged: Card | None = None,
        reader: Path | None = None,
        start_backend: StartBackend | None = None,
        **engine_overrides: Any,
    ) -> None:
        if merged is not None and merged.rule in folders:
            raise part_of_base(merged.rule)
        max_rank = stated_args(recipe, engine_overrides).get("max_lora_rank")
        requirements = Requirements.of(recipe, max_rank)
        named = folders if reader is None else {READER: reader, **folders}
        admitted = [requirements.admit(name, folder) for name, folder in named.items()]
        held = {each.held_as: each for each in admitted if isinstance(each, ServableAdapter)}
        if any(reads_exact_states(servable) for servable in admitted):
            recipe = recipe.served_as_trained()
        # Only now are the inputs known to be good.
        start = start_backend or STARTS[recipe.kind]
        self.backend = start(recipe, list(held.values()), engine_overrides, requirements.prompts)
        self.model = recipe.name
        self.base = (recipe.base, recipe.base_revision)
        self.requirements = requirements
        self._prompts = Prompts(requirements.prompts, self.backend.context_tokens)
        self._dispatcher = Dispatcher(self.backend)
        self._retired: list[Loaded] = []  # not served, and needed by what is in flight
        served_dtype = stated_args(recipe, engine_overrides)["dtype"]
        takes_heads = served_dtype == recipe.served_as_trained().serving_dtype
        self._rules = ServedRules(self.backend, requirements, merged, takes_heads=takes_heads)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.close)
            requirements.check_base(recipe)
            for servable in admitted:
                self._rules.put(servable)
            self.policies = self._card_of_policies(recipe, merged)
            on_failure.pop_all()

    @property
    def rules(self) -> Mapping[str, Card]:
        return self._rules.cards

    @property
    def folders(self) -> Mapping[str, Path]:
        """Where the weights are, but for a rule that the base itself answers."""
        return self._rules.folders

    @property
    def is_usable(self) -> bool:
        """False once a failed batch could not be cleared away: then nothing more is answered."""
        return self._dispatcher.is_usable

    @property
    def is_busy(self) -> bool:
        return bool(self._dispatcher.in_flight)

    @property
    def counters(self) -> EngineCounters:
        return replace(self.backend.counters(), adapters=self._rules.adapter_count)

    def text_tokens(self, text: str) -> int:
        """How many tokens a text has by itself; from any thread."""
        return self._prompts.text_tokens(text)

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score | Refusal]:
        """One outcome per request, in order: any mixture of conversations, rules and adapters."""
        call = self.submit(requests)
        self._finish(call)
        return call.results()

    def submit(self, requests: Sequence[ScoreRequest]) -> Call:
        """Queue all requests without waiting; those that cannot be queued are refused at once.
        `step` answers them. Virtual-time fair queueing, a quantum of tokens at a time
        (`FairQueue`): of a long call some are answered, then what others have asked meanwhile. The
        rules of one conversation come in the quantum in which it is computed, as many as fill it:
        what it computed need not stay for later. Rules whose adapters are in a slot come first.
        """
        self._dispatcher.check_usable()
        counted = CountedTexts(self._prompts.builder.judged_ids)
        call = Call([None] * len(requests), counted=counted)
        plan = CallPlan(call, self._rules, self._prompts, self._dispatcher.queue())
        try:
            for in_flight in plan.prompts(requests, self._waiting_for_slots()):
                self._dispatcher.submit(in_flight)
        except BaseException:
            self.cancel(call)
            raise
        return call

    def check(
        self,
        messages: Sequence[Message],
        rules: Sequence[str] | None = None,
        *,
        cache_salt: str | None = None,
        policies: Sequence[str] = (),
    ) -> Check:
        """Put one conversation to `rules` (default: all that are served), and to `policies`: texts
        that are no rule's, each answered under its `policy_name`. Conversations of
        different `cache_salt` share no keys and values, so that the time and the token counts of
        one tell nothing of another. Where it is partly unread (`guard.conversation.chat`), a rule
        has a verdict only if it finds a violation. Raises GuardError if there is no rule, or one
        twice, and for messages or rules that are no lists.
        """
        open_check = self.open_check(messages, rules, cache_salt=cache_salt, policies=policies)
        self._finish(open_check.call)
        return open_check.result()

    def open_check(
        self,
        messages: Sequence[Message],
        rules: Sequence[str] | None = None,
        *,
        cache_salt: str | None = None,
        policies: Sequence[str] = (),
    ) -> OpenCheck:
        """Start a check without waiting: several may be under way at once, driven by `step`."""
        cards, conversation = self.rules, tuple(messages)
        names = names_listed(cards if rules is None else rules, "rules")
        for message in conversation:
            if not isinstance(message, Message):
                remedy = "guard.conversation.chat.turns_of makes Messages of OpenAI's messages"
                got = repr(message)[:60]
                raise GuardError("messages must be a list of Message", got=got, remedy=remedy)
        if (
            not names and not policies
        ):  # and no verdict either: an empty check must not read as "allow"
            remedy = "Name one of the engine's rules, or leave them out to ask all"
            raise GuardError("there is no rule to check", remedy=remedy)
        if len(set(names)) < len(names):
            raise GuardError("a rule is named twice", got=", ".join(names), remedy="Name each once")
        served = {name: cards[name] for name in names if name in cards}
        texts = {name: card.rule_text for name, card in served.items()}
        requests = [
            ScoreRequest(conversation, texts.get(name, ""), name, cache_salt) for name in names
        ]
        for number, policy in enumerate(policies):
            judge: str | None = READER  # which refuses it, where there is none
            if self.policies is not None:
                served[policy_name(number)], judge = self.policies, self._rules.reader
            requests.append(ScoreRequest(conversation, policy, judge, cache_salt, is_policy=True))
        return OpenCheck(
            (*names, *map(policy_name, range(len(policies)))),
            {name: card.calibration for name, card in served.items()},
            self.submit(requests),
            {name: card.version for name, card in served.items()},
            unread_parts(conversation),
            ConversationForm(conversation),
            {name: card.by for name, card in served.items()},
        )

    def step(self) -> None:
        """Run one batch and hand its answers to their calls, as `Dispatcher.step`."""
        self._dispatcher.step()
        self._unload_retired()

    def cancel(self, call: Call) -> None:
        """Drop the requests of `call` in flight."""
        self._dispatcher.cancel(call)
        self._unload_retired()

    def add(self, name: str, folder: Path) -> None:
        """Serve one more. Raises GuardError as the constructor does, or if the name is taken."""
        self._rules.add(name, folder)

    def folder(self, name: str) -> Path:
        """Where the rule's weights are. Raises GuardError if no folder is served by this name."""
        return self._rules.of_folder(name).folder

    def serve(self, name: str, folder: Path | None = None) -> None:
        """Serve a rule, new or not, by the weights in `folder`, by default trained again where it
        was. They answer a conversation before anything changes; checks that were opened before end
        with the old ones. Raises GuardError as `add` does, or if the new weights give no verdict;
        what is served is then as before.
        """
        self._rules.check_not_merged(name)
        folder = folder or self.folder(name)
        candidate = f"{name}{CANDIDATE}"
        self._rules.add(candidate, folder)
        try:
            for refusal in self.check(TEST_CONVERSATION, [candidate]).refused.values():
                problem = f"no verdict: {refusal.why}"
                raise GuardError(problem, got=candidate, remedy="Train it again")
        except BaseException:
            self._give_up(candidate)
            raise
        before = self._rules.replace(name, candidate)
        if before is not None:
            self._retired.append(before)
        self._unload_retired()

    def remove(self, name: str) -> None:
        """Stop serving a rule; open checks end with it. Raises GuardError if none serves it."""
        self._rules.check_not_merged(name)
        self._rules.of_folder(name)  # raises where nothing serves it
        loaded = self._rules.own_adapter(name)
        if loaded is not None and self._dispatcher.needs(loaded):
            self._retired.append(loaded)
        elif loaded is not None:
            self.backend.unload(loaded)  # if it fails, the rule is served as before
        self._rules.release(name)

    def forget(self) -> None:
        """Empty the prefix cache. Raises GuardError while requests are in flight."""
        self.backend.forget()

    def close(self) -> None:
        self.backend.close()

    def __enter__(self) -> GuardEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _card_of_policies(self, recipe: Recipe, merged: Card | None) -> Card | None:
        if recipe.is_encoder or merged is not None:  # whose weights are one rule's
            return None
        if self._rules.reader is not None:
            return card_of_reader(self._rules.of_folder(READER).card, POLICIES, "")
        method = next(iter(recipe.methods))
        return card_of_base(recipe, self.requirements.prompts, method, POLICIES, "")

    def _finish(self, call: Call) -> None:
        """Step until the call is done; leave nothing of it in flight, whatever happens."""
        try:
            while not call.done:
                self.step()
        finally:
            self.cancel(call)

    def _give_up(self, candidate: str) -> None:
        """Stop serving weights that gave no verdict, whether or not the backend can free them."""
        loaded = self._rules.release(candidate)
        try:
            if loaded is not None:
                self.backend.unload(loaded)
        except Exception:  # why there is no verdict says more
            log.exception("the weights of %s could not be unloaded", candidate)

    def _unload_retired(self) -> None:
        """Free the weights that no rule is served by, once no check needs them."""
        for adapter in list(self._retired):
            if not self._dispatcher.needs(adapter):
                self.backend.unload(adapter)
                self._retired.remove(adapter)

    def _waiting_for_slots(self) -> frozenset[str]:
        """The rules whose adapters have to be copied into a slot first; none if all have slots."""
        if self._rules.adapter_count <= self.backend.slots:
            return frozenset()
        return self._rules.not_among(self.backend.in_slots())
