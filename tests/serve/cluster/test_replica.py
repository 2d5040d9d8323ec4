from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from guard.conversation.example import Message
from guard.errors import GuardError
from serve.cluster.messages import RelayedRequest
from serve.cluster.pool import RelayedCheck
from serve.cluster.replica import GuardReplica
from serve.cluster.snapshots import Snapshots, version_of
from tests.serve.cluster.words_cluster import as_json, body, kept, trained
from tests.serve.cluster.words_engine import BAD, VIOLATES, WordsStart, save_words

JSON = ((b"content-type", b"application/json"),)


def check(text: str, *rules: str) -> RelayedRequest:
    return RelayedRequest(
        "POST", "/v1/check", headers=JSON, body=json.dumps(body(text, *rules)).encode()
    )


@dataclass(frozen=True)
class Events:
    """That something has begun, and that it may end."""

    begun: threading.Event = field(default_factory=threading.Event)
    may_end: threading.Event = field(default_factory=threading.Event)


def with_replica(
    snapshots: Snapshots, use: Callable[[GuardReplica], Awaitable[None]]
) -> GuardReplica:
    """A replica that was started, used and closed."""

    async def run() -> GuardReplica:
        replica = GuardReplica("one", WordsStart(), snapshots)
        await replica.start()
        try:
            await use(replica)
        finally:
            await replica.close()
        return replica

    return asyncio.run(run())


def p_of(answer: dict[str, object]) -> dict[str, float]:
    results = answer["results"]
    assert isinstance(results, list)
    return {result["rule"]: result["p_violation"] for result in results}


def test_it_answers_as_one_server_does_and_says_which_replica_it_is(tmp_path: Path) -> None:
    snapshots = kept(Snapshots(tmp_path / "served"), trained(tmp_path))

    async def use(replica: GuardReplica) -> None:
        version = version_of(snapshots.read())
        answered = await replica.ask(check(f"this {VIOLATES}"), version)
        assert (answered.status, as_json(answered)["verdict"]) == (200, "violation")
        assert (b"x-guard-replica", b"one") in answered.headers
        refused = await replica.ask(
            RelayedRequest("POST", "/v1/check", headers=JSON, body=b"1"), version
        )
        assert (refused.status, as_json(refused)["verdict"]) == (422, "unjudged")
        assert "guard_checks_total" in (await replica.metrics()).value
        assert (await replica.ready()).value is True
        replica.check_health()

    with_replica(snapshots, use)


def test_it_gives_verdicts_alone_or_says_why_there_are_none(tmp_path: Path) -> None:
    snapshots = kept(Snapshots(tmp_path / "served"), trained(tmp_path))
    said = (Message("user", f"this {VIOLATES}"),)

    async def use(replica: GuardReplica) -> None:
        version = version_of(snapshots.read())
        named = await replica.check(RelayedCheck(said, ("manners",), None, 10.0), version)
        assert (named.replica, named.error) == ("one", None)
        assert [verdict.rule for verdict in named.value.verdicts] == ["manners"]
        assert named.value.outcome == "violation"
        late = await replica.check(RelayedCheck(said, ("manners",), None, -1.0), version)
        assert late.value is None and "too long" in (late.error or "")
        assert late.retry_after_s == math.inf and late.code == "too_late"
        unknown = await replica.check(RelayedCheck(said, ("unknown",), None, 10.0), version)
        assert unknown.value is None and "engine failed" in (unknown.error or "")
        assert unknown.code == "engine_failed"
        assert unknown.retry_after_s == math.inf  # what ends an engine would end the next one too
        replica.service.thread.close()
        refused = await replica.check(RelayedCheck(said, ("manners",), None, 10.0), version)
        assert "shutting down" in (refused.error or "") and refused.retry_after_s == 1
        assert refused.code == "overloaded"
        counted = (await replica.metrics()).value
        assert 'guard_verdicts_total{rule="manners",verdict="violation"} 0.0' in counted
        with pytest.raises(GuardError):
            await replica.check(RelayedCheck(said, ("manners",), None, 10.0), "another")

    with_replica(snapshots, use)


def test_a_rule_is_switched_and_back_and_what_is_refused_changes_nothing(tmp_path: Path) -> None:
    folders = trained(tmp_path)
    snapshots = kept(Snapshots(tmp_path / "served"), folders)
    first = snapshots.read()
    second = snapshots.keep(save_words(folders["manners"], b"second"))
    bad = snapshots.keep(save_words(folders["manners"], BAD))

    async def use(replica: GuardReplica) -> None:
        version = replica.version
        before = p_of(as_json(await replica.ask(check("a"), version)))
        refusal = await replica.switch("manners", bad)
        assert refusal.error is not None and "bad" in refusal.error
        assert replica.version == version
        assert (await replica.switch("manners", second)).error is None
        assert replica.version == version_of(first | {"manners": second})
        after = p_of(as_json(await replica.ask(check("a"), replica.version)))
        assert after["manners"] != before["manners"]
        assert after["greeting"] == before["greeting"]
        assert (await replica.switch("manners", first["manners"])).error is None
        assert replica.version == version
        assert (await replica.switch("manners", None)).error is None
        assert (await replica.switch("greeting", None)).error == (
            "'greeting' is the last rule; stop the server instead"
        )

    with_replica(snapshots, use)


def held(engine_method: Callable[..., None]) -> tuple[Callable[..., None], Events]:
    """The method of an engine, which begins and then waits."""
    events = Events()

    def wait(*arguments: object) -> None:
        events.begun.set()
        assert events.may_end.wait(60)
        engine_method(*arguments)

    return wait, events


def test_a_check_that_comes_while_weights_load_is_answered_by_the_version_that_it_names(
    tmp_path: Path,
) -> None:
    folders = trained(tmp_path)
    snapshots = kept(Snapshots(tmp_path / "served"), folders)
    second = snapshots.keep(save_words(folders["manners"], b"second"))

    async def use(replica: GuardReplica) -> None:
        version, engine = replica.version, replica.service._engine
        before = p_of(as_json(await replica.ask(check("a"), version)))
        engine.serve, loading = held(engine.serve)  # type: ignore[method-assign]
        switching = asyncio.create_task(replica.switch("manners", second))
        await asyncio.to_thread(loading.begun.wait, 60)
        assert replica.version != version
        asked = asyncio.create_task(replica.ask(check("a"), version))
        await asyncio.sleep(0)  # so that it has begun
        loading.may_end.set()
        assert (await switching).error is None
        assert p_of(as_json(await asked)) == before  # of the note, as nobody has changed it
        assert replica.version == version

    with_replica(snapshots, use)


def test_a_change_that_was_missed_is_made_up_for_though_the_check_that_began_it_is_gone(
    tmp_path: Path,
) -> None:
    snapshots = kept(Snapshots(tmp_path / "served"), trained(tmp_path))
    remaining = {"greeting": snapshots.read()["greeting"]}

    async def use(replica: GuardReplica) -> None:
        version, engine = version_of(remaining), replica.service._engine
        engine.remove, removing = held(engine.remove)  # type: ignore[method-assign]
        snapshots.write(remaining)
        gone = asyncio.create_task(replica.ask(check("a"), version))
        await asyncio.to_thread(removing.begun.wait, 60)
        gone.cancel()
        await asyncio.wait([gone])
        assert replica.version != version
        removing.may_end.set()
        assert p_of(as_json(await replica.ask(check("a"), version))).keys() == {"greeting"}
        replica.check_health()

    with_replica(snapshots, use)


def test_one_that_missed_a_change_makes_up_for_it_before_it_answers(tmp_path: Path) -> None:
    folders = trained(tmp_path)
    snapshots = kept(Snapshots(tmp_path / "served"), folders)
    first = snapshots.read()
    second = snapshots.keep(save_words(folders["manners"], b"second"))

    async def use(replica: GuardReplica) -> None:
        before = p_of(as_json(await replica.ask(check("a"), replica.version)))
        snapshots.write({"manners": second})
        after = as_json(await replica.ask(check("a"), version_of({"manners": second})))
        assert p_of(after).keys() == {"manners"}
        assert p_of(after)["manners"] != before["manners"]
        snapshots.write(first)
        again = as_json(await replica.ask(check("a"), version_of(first)))
        assert p_of(again) == before

    with_replica(snapshots, use)


def test_one_that_cannot_serve_what_the_others_serve_answers_nothing_and_is_unhealthy(
    tmp_path: Path,
) -> None:
    folders = trained(tmp_path)
    snapshots = kept(Snapshots(tmp_path / "served"), folders)
    first = snapshots.read()
    bad = snapshots.keep(save_words(folders["manners"], BAD))

    async def use(replica: GuardReplica) -> None:
        with pytest.raises(GuardError, match="do not match the requested version"):
            await replica.ask(check("a"), "a version that nobody noted")
        with pytest.raises(GuardError, match="cannot serve what the others serve"):
            replica.check_health()

    with_replica(snapshots, use)

    async def use_bad(replica: GuardReplica) -> None:
        served = first | {"manners": bad}
        snapshots.write(served)
        with pytest.raises(GuardError, match="bad"):
            await replica.ask(check("a"), version_of(served))

    with_replica(snapshots, use_bad)


def test_one_that_does_not_start_leaves_nothing_running(tmp_path: Path) -> None:
    folders = {"manners": save_words(tmp_path / "manners", BAD)}
    snapshots = kept(Snapshots(tmp_path / "served"), folders)

    async def use(replica: GuardReplica) -> None:
        pytest.fail("it started")

    with pytest.raises(GuardError, match="bad"):
        with_replica(snapshots, use)
