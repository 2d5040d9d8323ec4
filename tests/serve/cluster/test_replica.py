"""A replica, whose verdicts are of the version that is asked for, how it answers a request, and the
note that it reads.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from threading import Event

import pytest
from fastapi import FastAPI, Response
from fastapi.responses import StreamingResponse

from guard.conversation.example import Message
from guard.errors import GuardError
from serve.cluster.messages import RelayedCheck, RelayedRequest, ReplicaAnswer, answer_in_process
from serve.cluster.note import ServedNote, version_of
from serve.cluster.replica import GuardReplica
from serve.registry.rollout import Mode, Rollout
from tests.serve.cluster.words_cluster import as_json, asked, local_replicas, noted, p_of, trained
from tests.serve.cluster.words_engine import BAD, VIOLATES, save_words, version


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    return trained(tmp_path)


@pytest.fixture
def note(tmp_path: Path, folders: dict[str, Path]) -> ServedNote:
    return noted(tmp_path, folders)


def with_replica(note: ServedNote, use: Callable[[GuardReplica], Awaitable[None]]) -> None:
    """A replica is started, used and closed."""

    async def run() -> None:
        async with local_replicas(note, count=1) as started:
            await use(started.replicas[0])

    asyncio.run(run())


async def answers(replica: GuardReplica, version: str) -> dict[str, float]:
    """The probability of each rule."""
    return p_of(as_json(await replica.ask(asked("a"), version)))


def test_it_gives_verdicts_alone_or_says_why_there_are_none(note: ServedNote) -> None:
    async def use(replica: GuardReplica) -> None:
        async def check(rule: str, within_s: float = 10.0) -> ReplicaAnswer:
            said = (Message("user", f"this {VIOLATES}"),)
            return await replica.check(RelayedCheck(said, (rule,), None, within_s), replica.version)

        async def assert_refused(code: str, retry_after_s: float, answer: ReplicaAnswer) -> None:
            assert (answer.value, answer.code) == (None, code)
            assert answer.error and answer.retry_after_s == retry_after_s

        named = await check("manners")
        assert (named.replica, named.error) == ("replica-0", None)
        assert [verdict.rule for verdict in named.value.verdicts] == ["manners"]
        assert named.value.outcome == "violation"
        await assert_refused("too_late", math.inf, await check("manners", -1.0))
        # What ends an engine would end the next one too.
        await assert_refused("engine_failed", math.inf, await check("unknown"))
        replica.service.thread.close()
        await assert_refused("overloaded", 1, await check("manners"))
        counted = (await replica.metrics()).value
        assert 'guard_verdicts_total{rule="manners",verdict="violation"} 0.0' in counted

    with_replica(note, use)


def held(method: Callable[..., None]) -> tuple[Callable[..., None], Event, Event]:
    """The method of an engine, that it has begun, and that it may end."""
    begun, may_end = Event(), Event()

    def wait(*arguments: object) -> None:
        begun.set()
        assert may_end.wait(60)
        method(*arguments)

    return wait, begun, may_end


def test_a_check_that_comes_while_weights_load_is_answered_by_the_version_that_it_names(
    note: ServedNote, folders: dict[str, Path]
) -> None:
    second = Rollout(folder=version(save_words(folders["manners"], b"second")))

    async def use(replica: GuardReplica) -> None:
        version, engine = replica.version, replica.service._engine
        before = await answers(replica, version)
        engine.serve, begun, may_end = held(engine.serve)  # type: ignore[method-assign]
        switching = asyncio.create_task(replica.switch("manners", second))
        await asyncio.to_thread(begun.wait, 60)
        assert replica.version != version
        asking = asyncio.create_task(answers(replica, version))
        await asyncio.sleep(0)  # so that it has begun
        may_end.set()
        assert (await switching).error is None
        assert await asking == before  # of the note, as nobody has changed it
        assert replica.version == version

    with_replica(note, use)


def test_a_change_that_was_missed_is_made_up_for_though_the_check_that_began_it_is_gone(
    note: ServedNote, folders: dict[str, Path]
) -> None:
    first = note.read()
    second = {"manners": Rollout(folder=version(save_words(folders["manners"], b"second")))}

    async def use(replica: GuardReplica) -> None:
        before, engine = await answers(replica, replica.version), replica.service._engine
        engine.remove, begun, may_end = held(engine.remove)  # type: ignore[method-assign]
        note.write(second)
        gone = asyncio.create_task(replica.ask(asked("a"), version_of(second)))
        await asyncio.to_thread(begun.wait, 60)
        gone.cancel()
        await asyncio.wait([gone])
        assert replica.version != version_of(second)
        may_end.set()
        after = await answers(replica, version_of(second))
        assert after.keys() == {"manners"} and after["manners"] != before["manners"]
        note.write(first)
        assert await answers(replica, version_of(first)) == before
        replica.check_health()

    with_replica(note, use)


def test_one_that_cannot_serve_what_the_others_serve_answers_nothing_and_is_unhealthy(
    note: ServedNote, folders: dict[str, Path]
) -> None:
    bad = Rollout(folder=version(save_words(folders["manners"], BAD)))
    served = note.read() | {"manners": bad}

    async def use(replica: GuardReplica) -> None:
        with pytest.raises(GuardError, match="do not match the requested version"):
            await replica.ask(asked("a"), "a version that nobody noted")
        with pytest.raises(GuardError, match="cannot serve what the others serve"):
            replica.check_health()
        note.write(served)
        with pytest.raises(GuardError, match="bad"):
            await replica.ask(asked("a"), version_of(served))

    with_replica(note, use)
    for folder, said in ((bad.folder, "bad"), (folders["manners"], "these weights are none")):
        note.write({"manners": Rollout(folder=folder)})
        with pytest.raises(GuardError, match=said):  # nor does one start
            with_replica(note, lambda replica: pytest.fail("it started"))


def an_app() -> FastAPI:
    app = FastAPI()

    @app.get("/broken")
    async def broken() -> Response:
        raise ValueError("my address is 5 Elm Street")

    @app.get("/half")
    async def half() -> Response:
        async def parts() -> AsyncIterator[bytes]:
            yield b"half"
            raise ValueError("no more")

        return StreamingResponse(parts())

    return app


def test_an_error_s_response_is_the_response_and_half_of_one_is_none() -> None:
    answered = asyncio.run(answer_in_process(an_app(), RelayedRequest("GET", "/broken")))
    assert (answered.status, answered.body) == (500, b"Internal Server Error")
    with pytest.raises(ValueError, match="no more"):
        asyncio.run(answer_in_process(an_app(), RelayedRequest("GET", "/half")))


def test_what_is_noted_is_read_again_and_its_version_is_of_weights_and_modes(
    note: ServedNote, tmp_path: Path
) -> None:
    with pytest.raises(GuardError, match=r"nothing\.json.*cannot be read"):
        ServedNote(tmp_path / "nothing.json").read()
    served = note.read()
    assert version_of(dict(reversed(served.items()))) == version_of(served)
    second = Rollout(folder=version(save_words(tmp_path / "manners", b"second")))
    shadow = second.model_copy(update={"mode": Mode.parse("shadow")})
    variants = [served, served | {"manners": second}, served | {"manners": shadow}]
    variants.append({"greeting": served["greeting"]})
    assert len({version_of(variant) for variant in variants}) == 4
    for variant in variants:
        note.write(variant)
        assert note.read() == variant
