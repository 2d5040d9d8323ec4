"""A console of one rule with three versions, on an engine without a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from cryptography.fernet import Fernet

from guard.conversation.example import Message
from serve.api.app import create_app
from serve.console import add_console
from serve.policy.rule_set import RuleSet
from serve.registry.registry import RegisteredRule
from serve.registry.reviews import KEY, KeptCheck, KeptVerdict, ReviewPolicy, ReviewStore
from serve.scan.replay import PAGE
from tests.serve.api.tenants import shop_and_bank
from tests.serve.cluster.words_engine import WordsEngine
from tests.serve.kept import KeptVersions
from tests.serve.serving import serving

RULE = "medical_advice"
HOSTILE = "<script>alert('x')</script>"
HOSTILE_TURNS = (Message("user", HOSTILE), Message("assistant", f"{HOSTILE} of course"))


@dataclass
class ServedConsole:
    """A server with a console, and one who asks it; a redirect is not followed."""

    client: httpx.Client
    kept: KeptVersions
    store: ReviewStore

    @property
    def versions(self) -> list[str]:
        """The ids of the rule's versions, the champion's first."""
        rule = RegisteredRule("tiny", RULE, "alora")
        return [version.id for version in self.kept.registry.versions(rule)]

    def post(self, path: str, page: str, **fields: str) -> httpx.Response:
        """Send a form of a page, with the page's token unless another one is stated."""
        token = re.search('name="token" value="([0-9a-f]+)"', self.client.get(page).text)
        fields = {"token": token[1] if token else ""} | fields
        return self.client.post(path, data=fields)

    def sign_in(self, role: str) -> httpx.Response:
        self.client.cookies.clear()
        return self.post("/console/login", "/console/login", key=f"{role}'s key")

    def review_later(self, checks: int) -> None:
        """Keep conversations for review."""
        for number in range(checks):
            said = KeptVerdict(RULE, "0" * 64, "violation", 0.9, 0.5, False)
            self.store.keep(KeptCheck(f"request-{number}", "", f"{number}", HOSTILE_TURNS, (said,)))


Start = Callable[..., ServedConsole]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a server with a console; with tenants, or for whoever is on this machine."""
    monkeypatch.setenv(KEY, Fernet.generate_key().decode())
    kept = KeptVersions(tmp_path)
    for weights in (b"first", HOSTILE.encode(), b"third"):
        kept.train(RULE, weights)
    store = ReviewStore(kept.runs, ReviewPolicy(reviews=1))
    store.open()
    with ExitStack() as until_ended:

        def started(*, has_tenants: bool = True) -> ServedConsole:
            tenants = shop_and_bank() if has_tenants else None
            rule_sets = {name: RuleSet.any_of([RULE]) for name in ("support", "strict")}
            rollout = kept.find(RULE)
            assert rollout is not None
            engine = WordsEngine({RULE: rollout.folder})
            app = create_app(
                engine, tenants=tenants, rule_sets=rule_sets, source=kept, review_store=store
            )  # type: ignore[arg-type]
            add_console(app, kept.runs, tenants)
            return ServedConsole(until_ended.enter_context(serving(app)), kept, store)

        yield started


def save_replay(kept: KeptVersions) -> None:
    """What `make replay` leaves."""
    folder = kept.runs.root / "replay"
    folder.mkdir()
    title = '<!doctype html><html lang="en"><title>Replay</title><h1>Replay</h1>'
    (folder / PAGE).write_text(f"{title}<main>a quoted conversation</main>")
