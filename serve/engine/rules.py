"""Which rules an engine serves, and with what: adapters in the backend, heads, and the rule that
the base itself answers. Knows nothing of requests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from guard.errors import GuardError, did_you_mean
from guard.language import identifier
from guard.weights.card import Card
from serve.engine.adapter import READER, Requirements, Servable, ServableAdapter
from serve.engine.backend import Backend, Loaded
from serve.engine.head import ServableHead, check_size
from serve.engine.refusals import NotServed


class ServedRules:
    """The rules' adapters and heads. Those that the reader judges share its adapter. `merged` is
    the card of a rule that the base itself answers; `takes_heads` says whether the base's states
    are those that heads are fitted to.
    """

    def __init__(
        self,
        backend: Backend,
        requirements: Requirements,
        merged: Card | None,
        *,
        takes_heads: bool,
    ) -> None:
        self._backend = backend
        self._takes_heads = takes_heads
        self._requirements = requirements
        self._merged: dict[str, Card] = {}
        if merged is not None:
            self._merged[merged.rule] = merged
        self._served: dict[str, Servable] = {}  # in the order they were added
        self._loaded: dict[str, Loaded] = {}  # of those that are adapters

    @property
    def cards(self) -> Mapping[str, Card]:
        return self._merged | {
            name: served.card for name, served in self._served.items() if name != READER
        }

    @property
    def folders(self) -> Mapping[str, Path]:
        """Where the weights are, but for a rule that the base itself answers."""
        return {name: served.folder for name, served in self._served.items() if name != READER}

    @property
    def reader(self) -> str | None:
        """What policies that are no rule's are put to: None for the bare base."""
        return READER if READER in self._served else None

    @property
    def adapter_count(self) -> int:
        return len({loaded.adapter_id for loaded in self._loaded.values()})

    def serving(self, name: str | None) -> Servable | None:
        """What answers the rule; None for the base itself. Raises GuardError for no such rule."""
        if name is None or name in self._merged:
            return None
        return self.of_folder(name)

    def of_folder(self, name: str) -> Servable:
        """What is served by this name. Raises GuardError if there is none."""
        self.check_not_merged(name)
        if name == READER and name not in self._served:
            remedy = "Serve a decoder that is not merged"
            raise NotServed("no base that is served judges policies", remedy=remedy)
        if name not in self._served:
            remedy = did_you_mean(name, self._served) or "See the engine's rules"
            raise NotServed(f"rule '{name}' is not served", remedy=remedy)
        return self._served[name]

    def head(self, name: str | None) -> ServableHead | None:
        """The head that answers the rule, alone or on its adapter's states, if one does."""
        served = self._served.get(name or "")
        if isinstance(served, ServableAdapter):
            return served.head
        return served if isinstance(served, ServableHead) else None

    def reads_base(self, name: str | None) -> bool:
        """Whether the rule is a head on the base's own states, which others may read too."""
        return isinstance(self._served.get(name or ""), ServableHead)

    def not_among(self, adapter_ids: frozenset[int]) -> frozenset[str]:
        """The rules whose adapters have none of these ids."""
        return frozenset(
            name for name, loaded in self._loaded.items() if loaded.adapter_id not in adapter_ids
        )

    def loaded(self, name: str | None) -> Loaded | None:
        """The backend's handle of the rule's adapter; None if no adapter answers it. Raises
        KeyError for an adapter that the backend has not: the base's answer would pass for the
        rule's.
        """
        serving = self.serving(name)
        if not isinstance(serving, ServableAdapter):
            return None
        return self._loaded[serving.name]

    def own_adapter(self, name: str) -> Loaded | None:
        """What the backend has for this rule and no other one; None if there is nothing."""
        loaded = self._loaded.get(name)
        sharing = [rule for rule, shared in self._loaded.items() if shared == loaded]
        return loaded if sharing == [name] else None

    def add(self, name: str, folder: Path) -> None:
        """Serve one more. Raises GuardError if it cannot be served or the name is taken."""
        self.check_not_merged(name)
        if name in self._served:
            problem = "an adapter of this name is served already"
            raise GuardError(problem, got=name, remedy="Remove it first")
        servable = self._requirements.admit(name, folder)
        if isinstance(servable, ServableAdapter):
            self._check_layers(servable)
        self.put(servable)

    def put(self, servable: Servable) -> None:
        """Serve what was admitted. Raises GuardError if the backend cannot load it, rounds the
        states that a head reads, or has states of another size.
        """
        if reads_exact_states(servable) and not self._takes_heads:
            problem = "the engine computes in another dtype than the head was fitted in"
            remedy = "Start the engine with the head among its rules"
            raise GuardError(problem, got=servable.name, remedy=remedy)
        if isinstance(servable, ServableHead):
            check_size(servable, self._backend.state_size)
        elif isinstance(servable, ServableAdapter):
            if servable.head is not None:
                check_size(servable.head, self._backend.state_size)
            self._loaded[servable.name] = self._load(servable)
        covered = servable.card.coverage
        if covered is not None and covered.languages is not None:
            identifier()  # is loaded now, so that no check waits for it
        self._served[servable.name] = servable

    def replace(self, name: str, candidate: str) -> Loaded | None:
        """Serve the rule, new or not, by what is served as `candidate`, and nothing by that name.
        Returns what the backend had for the rule, to be unloaded when nothing in flight needs it.
        """
        before = self.own_adapter(name)
        self._loaded.pop(name, None)
        self._served[name] = replace(self._served.pop(candidate), name=name)
        if candidate in self._loaded:
            self._loaded[name] = self._loaded.pop(candidate)
        return before

    def release(self, name: str) -> Loaded | None:
        """Stop serving a rule. Returns what `replace` does."""
        before = self.own_adapter(name)
        del self._served[name]
        self._loaded.pop(name, None)
        return before

    def check_not_merged(self, name: str) -> None:
        """Raise GuardError if the base itself answers the rule, and would go on doing so."""
        if name in self._merged:
            raise part_of_base(name)

    def _check_layers(self, adapter: ServableAdapter) -> None:
        prepared = self._backend.adapted_layers
        missing = adapter.modules - prepared
        if prepared and missing:
            problem = "the engine was started without adapters of these layers"
            remedy = "Start it with this one, or give lora_target_modules"
            got = ", ".join(sorted(missing))
            raise GuardError(problem, where=adapter.folder, got=got, remedy=remedy)

    def _load(self, adapter: ServableAdapter) -> Loaded:
        for name, served in self._served.items():
            if isinstance(served, ServableAdapter) and served.held_as == adapter.held_as:
                return self._loaded[name]
        # The name is part of the key of cached KV blocks; with the version in it, another one never
        # meets old blocks.
        name = f"{adapter.name}@{adapter.card.version[:16]}"
        loaded = self._backend.load(name, adapter.folder)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._backend.unload, loaded)
            if self._requirements.admit(adapter.name, adapter.folder) != adapter:
                # Weights of one training, calibration of another.
                problem = "the adapter was replaced while it was loaded"
                raise GuardError(problem, where=adapter.folder, remedy="Try again")
            on_failure.pop_all()
        return loaded


def reads_exact_states(servable: Servable) -> bool:
    """Whether it is a head, or a decoder's adapter that answers by one: fitted to states as exact
    as in training. An encoder is served in the dtype of training in any case.
    """
    if isinstance(servable, ServableHead):
        return True
    if not isinstance(servable, ServableAdapter):
        return False
    return servable.head is not None and servable.shares_conversation


def part_of_base(rule: str) -> GuardError:
    """The error of a rule that the base itself answers, where other weights are to answer it."""
    remedy = f"To change it, run `make merge RULE={rule}` and start again"
    return GuardError(f"rule '{rule}' is part of the base", remedy=remedy)
