"""What every replica serves, as values that travel to it. Knows nothing of Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from guard.prompt.builders import prompt_builder
from serve.api.app import create_app
from serve.api.input.limits import POLICIES
from serve.api.observe.record import Observer
from serve.cluster.log import log_into
from serve.cluster.replica import ServedApp
from serve.cluster.service import CountTokens
from serve.engine import GuardEngine
from serve.engine.engines import GuardEngines
from serve.engine.prompts import Prompts
from serve.engine.thread.engine_thread import TIMEOUT_S
from serve.observers import open_observers
from serve.policy.rule_set import RuleSet
from serve.registry.reviews import ReviewStore
from serve.registry.source import RolloutSource
from serve.selection import ServedPart, start_warm
from serve.tenants.tenant_file import Tenants


@dataclass(frozen=True)
class ServedOptions:
    """The options of the command line, read and checked. A StartApp.

    Each replica writes its own lines to the audit log, and its log into the pipe `log`.
    """

    parts: Sequence[ServedPart]
    timeout_s: float = TIMEOUT_S
    rule_sets: Mapping[str, RuleSet] = field(default_factory=dict)
    tenants: Tenants | None = None
    audit_log: Path | None = None
    traces: str | None = None
    audit_key: Path | None = None
    log: Path | None = None
    review_store: ReviewStore | None = None
    policies: int = POLICIES
    source: RolloutSource = field(default_factory=RolloutSource)  # the ingress's: it alone writes

    @property
    def folders(self) -> dict[str, Path]:
        folders: dict[str, Path] = {}
        for part in self.parts:
            folders |= part.folders
        return folders

    def token_counter(self) -> CountTokens:
        """A function that counts a text's tokens as the engines do, where it has most.

        Raises GuardError where a base has no fit tokenizer.
        """
        prompts: list[Prompts] = []
        for part in self.parts:
            prompts.append(Prompts(prompt_builder(part.recipe), part.recipe.context_tokens))

        def count(text: str) -> int:
            return max(base_prompts.text_tokens(text) for base_prompts in prompts)

        return count

    def __call__(self, folders: Mapping[str, Path]) -> ServedApp:
        """Start an engine on these folders, and the app around it.

        Raises GuardError if it does not start.
        """
        if self.log is not None:
            log_into(self.log)
        observers = open_observers(self.audit_log, self.traces, self.audit_key)

        def start(last: Mapping[str, Path] | None) -> list[GuardEngine]:
            """Start the engines on what was served last, at first on `folders`."""
            return start_warm(self.parts, folders if last is None else last)

        engine = GuardEngines(start)
        return ServedApp(self.app(engine, observers), engine.close)

    def app(self, engine: GuardEngines, observers: Sequence[Observer], **settings: Any) -> FastAPI:
        """The app around an engine, with further `settings` of `create_app`."""
        return create_app(
            engine,
            self.timeout_s,
            rule_sets=self.rule_sets,
            tenants=self.tenants,
            observers=observers,
            review_store=self.review_store,
            policies=self.policies,
            **settings,
        )
