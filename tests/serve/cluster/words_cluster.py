"""Clusters of replicas without a model, in this process and on Ray. Tests only."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from fastapi import FastAPI

from serve.api.observe.record import Observer
from serve.cluster import messages
from serve.cluster.front.ingress import create_ingress
from serve.cluster.note import ServedNote
from serve.cluster.replica import GuardReplica
from serve.cluster.service import ClusterService
from serve.policy.rule_set import RuleSet
from serve.registry.reviews import ReviewStore
from serve.registry.rollout import Rollout
from serve.registry.source import RolloutSource
from serve.tenants.key_ring import key_hash
from serve.tenants.tenant_file import Tenants, load_tenants
from tests.serve.cluster.words_engine import WordsStart, save_words, version, words
from tests.serve.found import Found
from tests.serve.serving import serving

REPLICA = "x-guard-replica"
RULES = ("greeting", "manners")


def trained(root: Path, rules: Sequence[str] = RULES) -> dict[str, Path]:
    """A folder for each rule, with weights of its own."""
    return {rule: save_words(root / rule, rule.encode()) for rule in rules}


def noted(root: Path, folders: Mapping[str, Path]) -> ServedNote:
    """What is served at first: versions of these weights."""
    note = ServedNote(root / "served.json")
    note.write({rule: Rollout(folder=version(folder)) for rule, folder in folders.items()})
    return note


def found_in(root: Path) -> Found:
    """The versions of what is trained in a folder."""
    return Found(lambda rule: version(root / rule) if (root / rule).is_dir() else None)


def service_of(
    replicas: messages.Replicas,
    note: ServedNote,
    folders: Mapping[str, Path],
    observers: Sequence[Observer] = (),
    **options: Any,
) -> ClusterService:
    """The service of these replicas; other rules are trained beside these."""
    source = options.pop("source", found_in(next(iter(folders.values())).parent))
    return ClusterService(replicas, note, words, source, observers, **options)


class LocalReplicas:
    """Replicas in this process, each with an app and an engine of its own. A `Replicas`."""

    def __init__(self, replicas: Sequence[GuardReplica]) -> None:
        self.replicas = list(replicas)
        self.keys: list[str] = []

    async def ask(
        self, relayed: messages.RelayedRequest, key: str, version: str
    ) -> messages.RelayedResponse:
        return await self._of(key).ask(relayed, version)

    async def check(
        self, relayed: messages.RelayedCheck, key: str, version: str
    ) -> messages.ReplicaAnswer:
        return await self._of(key).check(relayed, version)

    def _of(self, key: str) -> GuardReplica:
        self.keys.append(key)
        if not self.replicas:
            raise messages.ReplicaLost("no replica is there")
        number = int(hashlib.sha256(key.encode()).hexdigest(), 16)
        return self.replicas[number % len(self.replicas)]

    async def each(
        self, method: str, *arguments: object, within_s: float, may_miss: bool = False
    ) -> list[messages.ReplicaAnswer]:
        if not self.replicas:
            raise messages.ReplicaLost("no replica is there")
        return [await getattr(replica, method)(*arguments) for replica in self.replicas]

    async def running(self) -> int:
        return len(self.replicas)


@contextlib.asynccontextmanager
async def local_replicas(
    note: ServedNote, count: int = 2, start: WordsStart | None = None
) -> AsyncIterator[LocalReplicas]:
    """Replicas of WordsEngine, started and closed."""
    async with contextlib.AsyncExitStack() as until_closed:
        replicas = []
        for number in range(count):
            replica = GuardReplica(f"replica-{number}", start or WordsStart(), note)
            await replica.start()
            until_closed.push_async_callback(replica.close)
            replicas.append(replica)
        yield LocalReplicas(replicas)


class LocalCluster:
    """Two replicas in this process, behind an ingress."""

    def __init__(
        self,
        root: Path,
        rules: Sequence[str] = RULES,
        observers: Sequence[Observer] = (),
        source: RolloutSource | None = None,
        others: Mapping[str, Path] | None = None,
        review_store: ReviewStore | None = None,
        **options: Any,
    ) -> None:
        self.root = root
        self.folders = trained(root, rules) | dict(others or {})
        self.pool = LocalReplicas([])
        self._noted = noted(root, self.folders)
        self._start = WordsStart(review_store=review_store)
        source = source or found_in(next(iter(self.folders.values())).parent)
        served = {"source": source, "review_store": review_store}
        service = service_of(self.pool, self._noted, self.folders, observers, **served)
        self._app = create_ingress(service, **({"timeout_s": 10.0} | options))

    @contextlib.contextmanager
    def client(self) -> Iterator[httpx.Client]:
        """A client of it. Replicas run in the ingress's event loop, so they start with it."""
        inner = self._app.router.lifespan_context

        @contextlib.asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            async with inner(app), contextlib.AsyncExitStack() as until_closed:
                replicas = local_replicas(self._noted, start=self._start)
                started = await until_closed.enter_async_context(replicas)
                self.pool.replicas = started.replicas
                yield

        self._app.router.lifespan_context = lifespan
        with serving(self._app) as client:
            yield client


@contextlib.contextmanager
def deployed(root: Path, replicas: int, folders: Mapping[str, Path]) -> Iterator[httpx.Client]:
    """A client of what is in front of replicas of WordsEngine, on the Ray that runs."""
    from serve.cluster.ray_pool import deployed_replicas  # Ray, which quick tests do not have

    note = noted(root, folders)
    with deployed_replicas(replicas, WordsStart(), note) as pool:
        service = service_of(pool, note, folders)
        with serving(create_ingress(service, 30.0, replicas=replicas)) as client:
            yield client


def replica_processes() -> list[int]:
    """The processes of the replicas below this one, by the name that Ray gives them."""
    pids: list[int] = []
    for process in psutil.Process(os.getpid()).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "ServeReplica:centurion:" in " ".join(process.cmdline()):
                pids.append(process.pid)
    return sorted(pids)


def tenants_of(root: Path, rule_sets: Mapping[str, RuleSet], **rule_set_of: str) -> Tenants:
    """Tenants with a rule set and two checks at once each, and a publisher; a tenant's name is
    its key.
    """
    tenants: dict[str, Any] = {}
    for name, rule_set in rule_set_of.items():
        keys, limits = {"keys_sha256": [key_hash(name)]}, {"concurrent_checks": 2}
        tenants[name] = {**keys, "rule_sets": [rule_set], "limits": limits}
    admins = {"admin": {"keys_sha256": [key_hash("admin")], "role": "publisher"}}
    content = {"admins": admins, "tenants": tenants}
    (root / "tenants.yaml").write_text(yaml.safe_dump(content))
    return load_tenants(root / "tenants.yaml", rule_sets)


def body(text: str, *rules: str) -> dict[str, object]:
    """A check of one message."""
    request: dict[str, object] = {"messages": [{"role": "user", "content": text}]}
    if rules:
        request["rules"] = list(rules)
    return request


def p_of(answer: Any) -> dict[str, float]:
    """The probability of each rule in the body of an answer."""
    return {result["rule"]: result["p_violation"] for result in answer["results"]}


def alone(client: httpx.Client) -> httpx.Client:
    """Another client of the same server: threads that share one may close each other's connection,
    where many of them are idle.
    """
    address, timeout = client.base_url, client.timeout
    # To verify nobody: what that needs takes longer to load than the check.
    return httpx.Client(base_url=address, timeout=timeout, trust_env=False, verify=False)


def as_json(answered: messages.RelayedResponse) -> Any:
    return json.loads(answered.body)


def asked(text: str, *rules: str) -> messages.RelayedRequest:
    """A check of one message as it is relayed."""
    content, json_type = json.dumps(body(text, *rules)), (b"content-type", b"application/json")
    return messages.RelayedRequest("POST", "/v1/check", headers=(json_type,), body=content.encode())
