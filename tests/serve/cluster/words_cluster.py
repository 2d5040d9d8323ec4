"""Clusters of replicas without a model, in this process and on Ray. Tests only."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from fastapi import FastAPI

from serve.api.observe.record import Observer
from serve.cluster.front.ingress import create_ingress
from serve.cluster.messages import (
    RelayedCheck,
    RelayedRequest,
    RelayedResponse,
    ReplicaAnswer,
    ReplicaLost,
    Replicas,
)
from serve.cluster.replica import GuardReplica
from serve.cluster.shards.placement import placed, split
from serve.cluster.shards.service import ClusterService
from serve.cluster.shards.shard import Shard
from serve.cluster.size import ReplicaRange
from serve.cluster.snapshots import Snapshots
from serve.policy.rule_set import RuleSet
from serve.tenants.key_ring import key_hash
from serve.tenants.tenant_file import Tenants, load_tenants
from tests.serve.cluster.words_engine import WordsStart, save_words, words
from tests.serve.serving import serving

REPLICA = "x-guard-replica"
RULES = ("greeting", "manners")
SIX_RULES = tuple(f"rule_{letter}" for letter in "abcdef")  # for two shards
ON = placed(SIX_RULES, 2)  # the shard of each


def trained(root: Path, rules: Sequence[str] = RULES) -> dict[str, Path]:
    """A folder for each rule, with weights of its own."""
    return {rule: save_words(root / rule, rule.encode()) for rule in rules}


def rules_on(shard: int) -> list[str]:
    """The ones of SIX_RULES that are on a shard, in their order."""
    return [rule for rule in SIX_RULES if ON[rule] == shard]


def noted(root: Path, folders: Mapping[str, Path], shards: int = 1) -> list[Snapshots]:
    """What each shard serves at first."""
    all_snapshots: list[Snapshots] = []
    for number, some in enumerate(split(folders, shards)):
        all_snapshots.append(Snapshots(root / "served", f"shard-{number}.json"))
        all_snapshots[-1].keep_all(some)
    return all_snapshots


def find_in(root: Path) -> Callable[[str], Path | None]:
    """Finds what is trained in a folder."""
    return lambda rule: root / rule if (root / rule).is_dir() else None


def sharded(
    pools: Sequence[Replicas],
    snapshots: Sequence[Snapshots],
    folders: Mapping[str, Path],
    observers: Sequence[Observer] = (),
) -> ClusterService:
    """The service of shards with these replicas; other rules are trained beside these."""
    find = find_in(next(iter(folders.values())).parent)
    shards: list[Shard] = []
    for pool, own, some in zip(pools, snapshots, split(folders, len(pools)), strict=True):
        shards.append(Shard(pool, own, some, find))
    return ClusterService(shards, words, folders, find, observers)


class LocalReplicas:
    """Replicas in this process, each with an app and an engine of its own. A `Replicas`."""

    def __init__(self, replicas: Sequence[GuardReplica]) -> None:
        self.replicas = list(replicas)
        self.keys: list[str] = []

    async def ask(self, relayed: RelayedRequest, key: str, version: str) -> RelayedResponse:
        return await self._of(key).ask(relayed, version)

    async def check(self, relayed: RelayedCheck, key: str, version: str) -> ReplicaAnswer:
        return await self._of(key).check(relayed, version)

    def _of(self, key: str) -> GuardReplica:
        self.keys.append(key)
        if not self.replicas:
            raise ReplicaLost("no replica is there")
        number = int(hashlib.sha256(key.encode()).hexdigest(), 16)
        return self.replicas[number % len(self.replicas)]

    async def each(
        self, method: str, *arguments: object, within_s: float, may_miss: bool = False
    ) -> list[ReplicaAnswer]:
        if not self.replicas:
            raise ReplicaLost("no replica is there")
        return [await getattr(replica, method)(*arguments) for replica in self.replicas]

    async def running(self) -> int:
        return len(self.replicas)


@contextlib.asynccontextmanager
async def local_replicas(snapshots: Snapshots, count: int = 2) -> AsyncIterator[LocalReplicas]:
    """Replicas of WordsEngine, started and closed."""
    async with contextlib.AsyncExitStack() as until_closed:
        replicas = []
        for number in range(count):
            replica = GuardReplica(f"replica-{number}", WordsStart(), snapshots)
            await replica.start()
            until_closed.push_async_callback(replica.close)
            replicas.append(replica)
        yield LocalReplicas(replicas)


class LocalCluster:
    """Shards of two replicas each, in this process, behind an ingress."""

    def __init__(
        self,
        root: Path,
        rules: Sequence[str] = RULES,
        shards: int = 1,
        observers: Sequence[Observer] = (),
        **options: Any,
    ) -> None:
        self.root = root
        self.folders = trained(root, rules)
        self.pools = [LocalReplicas([]) for _ in range(shards)]
        self._snapshots = noted(root, self.folders, shards)
        service = sharded(self.pools, self._snapshots, self.folders, observers)
        self._app = create_ingress(service, **({"timeout_s": 10.0} | options))

    @contextlib.contextmanager
    def client(self) -> Iterator[httpx.Client]:
        """A client of it. Replicas run in the ingress's event loop, so they start with it."""
        inner = self._app.router.lifespan_context

        @contextlib.asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            async with inner(app), contextlib.AsyncExitStack() as until_closed:
                for pool, snapshots in zip(self.pools, self._snapshots, strict=True):
                    started = await until_closed.enter_async_context(local_replicas(snapshots))
                    pool.replicas = started.replicas
                yield

        self._app.router.lifespan_context = lifespan
        with serving(self._app) as client:
            yield client


@contextlib.contextmanager
def deployed(
    root: Path, size: ReplicaRange, folders: Mapping[str, Path], shards: int = 1
) -> Iterator[httpx.Client]:
    """A client of what is in front of replicas of WordsEngine, on the Ray that runs."""
    from serve.cluster.ray_pool import deployed_replicas  # Ray, which quick tests do not have

    snapshots = noted(root, folders, shards)
    with deployed_replicas(size, WordsStart(), snapshots) as pools:
        service = sharded(pools, snapshots, folders)
        with serving(create_ingress(service, 30.0, most_replicas=size.high)) as client:
            yield client


def replica_processes(shard: int = 0) -> list[int]:
    """The processes of a shard's replicas below this one, by the name that Ray gives them."""
    pids: list[int] = []
    for process in psutil.Process(os.getpid()).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if f"ServeReplica:centurion-{shard}:" in " ".join(process.cmdline()):
                pids.append(process.pid)
    return sorted(pids)


def tenants_of(root: Path, rule_sets: Mapping[str, RuleSet], **rule_set_of: str) -> Tenants:
    """Tenants with a rule set and two checks at once each, and an administrator; a tenant's name is
    its key.
    """
    tenants: dict[str, Any] = {}
    for name, rule_set in rule_set_of.items():
        keys, limits = {"keys_sha256": [key_hash(name)]}, {"concurrent_checks": 2}
        tenants[name] = {**keys, "rule_sets": [rule_set], "limits": limits}
    content = {"admin_keys_sha256": [key_hash("admin")], "tenants": tenants}
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


def as_json(answered: RelayedResponse) -> Any:
    return json.loads(answered.body)


def asked(text: str, *rules: str) -> RelayedRequest:
    """A check of one message as it is relayed."""
    content, json_type = json.dumps(body(text, *rules)), (b"content-type", b"application/json")
    return RelayedRequest("POST", "/v1/check", headers=(json_type,), body=content.encode())
