"""Replicas around an engine without a model, whose answers tell which weights gave them. Tests
only.

Neither torch nor vLLM is imported: a replica's process starts in a second.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI

from guard.card import Card, load_card, weights_sha256
from guard.errors import GuardError
from guard.example import Message
from serve.api.app import create_app
from serve.cluster.ingress import create_ingress
from serve.cluster.messages import HttpAnswered, HttpAsked
from serve.cluster.pool import Named, ReplicaLost, Replicas
from serve.cluster.replica import GuardReplica, ServedApp
from serve.cluster.rules import ClusterRules
from serve.cluster.size import ReplicaRange
from serve.cluster.snapshots import Snapshots
from serve.engine import OpenCheck
from tests.serve.toy_engine import ToyEngine

VIOLATES = "violates"  # in a message: every rule says so
SLOW = "slowly"  # in a message: the batch takes SLOW_S
SLOW_S = 0.3
BAD = b"bad"  # weights that no engine takes
RULES = ("greeting", "manners")


def train(folder: Path, weights: bytes) -> Path:
    """A folder as training leaves it, with weights that no model can load."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    (folder / "adapter_config.json").write_text("{}")
    card = Card(
        rule=folder.name,
        rule_text="Be nice.",
        rule_hash="",
        prompt_hash="",
        method="alora",
        model="tiny",
        base="",
        base_revision="",
        data_hash="",
        test_sha256="",
        seed=0,
        recipe={},
        versions={},
        metrics={},
        temperature=1.0,
        bias=0.0,
        threshold=0.5,
        uncertainty_band=(0.4, 0.6),
        max_fpr=None,
        weights_sha256=weights_sha256(folder),
    )
    card.save(folder)
    return folder


def trained(root: Path, weights: bytes = b"first") -> dict[str, Path]:
    """A folder for each of RULES."""
    return {rule: train(root / rule, weights) for rule in RULES}


def strength(weights: bytes) -> float:
    """By how many nats the weights are surer than others; no two of a test's are the same."""
    return int(hashlib.sha256(weights).hexdigest()[:4], 16) / 0xFFFF


class VersionedEngine(ToyEngine):
    """Says of each rule what its weights say: a violation where a message VIOLATES, else none."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        super().__init__(dict.fromkeys(folders, -5.0))
        self.rules = {}  # type: ignore[assignment]
        for name, folder in folders.items():
            self.serve(name, folder)

    def serve(self, name: str, folder: Path | None = None) -> None:
        folder = folder or self.folders[name]
        weights = (folder / "adapter_model.safetensors").read_bytes()
        if weights == BAD:
            raise GuardError("these weights are bad", where=folder)
        self.folders[name] = folder
        self.rules[name] = load_card(folder)  # type: ignore[assignment]

    def open_check(
        self,
        messages: Sequence[Message],
        rules: Sequence[str] | None,
        *,
        cache_salt: str | None = None,
    ) -> OpenCheck:
        check = super().open_check(messages, rules, cache_salt=cache_salt)
        text = " ".join(message.content for message in messages)
        sign = 1.0 if VIOLATES in text else -1.0
        names, call = self.open[-1]
        for index, name in enumerate(names):
            weights = (self.folders[name] / "adapter_model.safetensors").read_bytes()
            self.logits = dict(self.logits) | {name: sign * (2 + strength(weights))}
            call.outcomes[index] = self._outcome(name, call)
        if SLOW not in text:
            call.waiting.clear()
        else:
            names.clear()
        calibrations = {name: card.calibration for name, card in self.rules.items()}  # type: ignore[attr-defined]
        return OpenCheck(check.rules, calibrations, call)

    def step(self) -> None:
        time.sleep(SLOW_S)
        for _, call in self.open:
            call.waiting.clear()


@dataclass(frozen=True)
class VersionedStart:
    """Starts a replica's app around a VersionedEngine. A StartApp."""

    timeout_s: float = 30.0

    def __call__(self, folders: Mapping[str, Path]) -> ServedApp:
        engine = VersionedEngine(folders)
        return ServedApp(create_app(engine, self.timeout_s), lambda: None)  # type: ignore[arg-type]


class LocalReplicas:
    """Replicas in this process, each with an app and an engine of its own. A `Replicas`."""

    def __init__(self, replicas: Sequence[GuardReplica]) -> None:
        self.replicas = list(replicas)
        self.keys: list[str] = []

    async def ask(self, asked: HttpAsked, key: str, version: str) -> HttpAnswered:
        self.keys.append(key)
        if not self.replicas:
            raise ReplicaLost("no replica is there")
        number = int(hashlib.sha256(key.encode()).hexdigest(), 16)
        return await self.replicas[number % len(self.replicas)].ask(asked, version)

    async def each(self, method: str, *arguments: object, within_s: float) -> list[Named]:
        if not self.replicas:
            raise ReplicaLost("no replica is there")
        return [await getattr(replica, method)(*arguments) for replica in self.replicas]

    async def running(self) -> int:
        return len(self.replicas)


@contextlib.asynccontextmanager
async def local_replicas(snapshots: Snapshots, count: int = 2) -> AsyncIterator[LocalReplicas]:
    """Replicas of VersionedEngine, started and closed."""
    async with contextlib.AsyncExitStack() as until_closed:
        replicas = []
        for number in range(count):
            replica = GuardReplica(f"replica-{number}", VersionedStart(), snapshots)
            await replica.start()
            until_closed.push_async_callback(replica.close)
            replicas.append(replica)
        yield LocalReplicas(replicas)


def kept(snapshots: Snapshots, folders: Mapping[str, Path]) -> Snapshots:
    """The snapshots, with these folders served."""
    snapshots.write({rule: snapshots.keep(folder) for rule, folder in folders.items()})
    return snapshots


@contextlib.contextmanager
def ray_cluster(
    root: Path, size: ReplicaRange, folders: Mapping[str, Path]
) -> Iterator[tuple[FastAPI, Replicas]]:
    """The app in front of replicas of VersionedEngine on Ray, and these replicas."""
    from serve.cluster.ray_pool import ray_replicas  # Ray, which quick tests do not have

    snapshots = kept(Snapshots(root / "served"), folders)
    with ray_replicas(size, VersionedStart(), snapshots, root / "ray") as pool:
        rules = ClusterRules(pool, snapshots, folders)
        yield create_ingress(pool, rules, 30.0, most_replicas=size.high), pool


def body(text: str, *rules: str) -> dict[str, object]:
    """A check of one message."""
    request: dict[str, object] = {"messages": [{"role": "user", "content": text}]}
    if rules:
        request["rules"] = list(rules)
    return request


def as_json(answered: HttpAnswered) -> dict[str, object]:
    """The body of a response."""
    content: dict[str, object] = json.loads(answered.body)
    return content
