"""A real engine is killed amid a request and started again by the server, with what it served; and
when an engine is dead.
"""

from __future__ import annotations

import shutil
import time
import weakref
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest

from guard.errors import GuardError
from guard.weights.card import load_card, read_card
from serve.api.app import create_app
from serve.engine import GuardEngine
from serve.engine.mixed import MixedEngine
from serve.engine.thread.engine_thread import EngineThread
from serve.engine.thread.refusals import Overloaded
from serve.engine.thread.restart import PAUSES_S, RestartableEngine, RestartAttempts
from tests.serve.bench.small_engine import small_recipe
from tests.serve.cards import recipe
from tests.serve.engine.toy import ToyBackend
from tests.serve.guarded import CONVERSATION, peft_logit, save_adapter
from tests.serve.serving import MESSAGES, serving, wait_until

TEXT = "The assistant must not give medical advice."
TOLERANCE = 3e-4
RESTARTED_S = 30.0
BODY = {"messages": MESSAGES, "rules": ["replaced", "moved"]}


def test_attempts_are_numbered_and_begin_again_after_a_long_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attempts = RestartAttempts()
    attempts.died()
    assert [attempts.next_pause_s() for _ in PAUSES_S] == list(PAUSES_S)
    assert attempts.next_pause_s() is None
    attempts.started()
    attempts.died()  # at once
    assert attempts.next_pause_s() is None
    monkeypatch.setattr("serve.engine.thread.restart.STABLE_S", -1.0)
    attempts.died()
    assert attempts.next_pause_s() == PAUSES_S[0]


def test_a_base_without_rules_is_not_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toys = [ToyBackend(), ToyBackend()]
    engines: list[GuardEngine] = []
    for name, toy in zip("ab", toys, strict=True):
        folders = {name: save_adapter(tmp_path / name, name, seed=1)}
        engines.append(GuardEngine(recipe(), folders, start_backend=lambda *_, toy=toy: toy))
    with RestartableEngine(lambda _: MixedEngine(engines)) as engine:
        engine.remove("a")
        assert engine.works()
        monkeypatch.setattr(toys[1], "step", lambda: 1 / 0)
        assert not engine.works()


class Model:
    """What a start has in memory, in a circle as most of an engine is."""

    def __init__(self) -> None:
        self.itself = self


def test_neither_a_dead_engine_nor_a_failed_start_is_in_memory_when_the_next_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.engine.thread.restart.PAUSES_S", (0.0, 0.0))
    folder = save_adapter(tmp_path / "rule", "rule", seed=1)
    started: list[weakref.ref[GuardEngine | Model]] = []
    still_there: list[int] = []

    def start(moved: Mapping[str, Path] | None) -> GuardEngine:
        still_there.append(sum(reference() is not None for reference in started))
        if moved is not None:
            model = Model()
            started.append(weakref.ref(model))
            raise RuntimeError("the device is gone")
        toy = ToyBackend()
        engine = GuardEngine(recipe(), {"rule": folder}, start_backend=lambda *_: toy)
        started.append(weakref.ref(engine))
        monkeypatch.setattr(toy, "step", broken)
        monkeypatch.setattr(toy, "scrub", broken)
        return engine

    def broken() -> None:
        raise GuardError("the device is gone")

    thread = EngineThread(RestartableEngine(start))
    thread.check(CONVERSATION, ["rule"])
    wait_until(lambda: thread.failure is not None)
    assert "the device is gone" in str(thread.failure)
    assert still_there == [0, 0, 0]


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two trainings of one rule, which say different things."""
    root = tmp_path_factory.mktemp("versions")
    return [save_adapter(root / str(seed), "medical", seed=seed, text=TEXT) for seed in (1, 2)]


def expected(version: Path) -> float:
    """What plain PEFT and the card say."""
    logit = peft_logit(CONVERSATION, TEXT, version)
    return load_card(version).calibration.verdict("medical", logit).p_violation


def kill(engine: GuardEngine, *, is_clearable: bool) -> None:
    """Take the model from the engine's worker, or its cache too: no batch succeeds any more."""
    backend = engine._backend
    runner = backend._engine.model_executor.driver_worker.worker.model_runner  # type: ignore[attr-defined]
    runner.model = None
    if not is_clearable:
        runner.kv_caches = None


def check_until_served(client: httpx.Client) -> httpx.Response:
    """The first answer that is not 503; each of these is unjudged."""
    began = time.monotonic()
    while True:
        response = client.post("/v1/check", json=BODY)
        if response.status_code != 503:
            return response
        assert response.json()["verdict"] == "unjudged"
        assert time.monotonic() < began + RESTARTED_S
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("is_clearable", [True, False])
def test_an_engine_that_is_killed_amid_a_request_serves_again_what_it_served_last(
    versions: list[Path], tmp_path: Path, *, is_clearable: bool
) -> None:
    folders = {name: tmp_path / name for name in ("replaced", "moved")}
    for folder in folders.values():
        shutil.copytree(versions[0], folder)
    engines: list[GuardEngine] = []

    def start(moved: Mapping[str, Path] | None) -> GuardEngine:
        engines.append(GuardEngine(small_recipe(), folders | dict(moved or {})))
        return engines[-1]

    with RestartableEngine(start) as engine, serving(create_app(engine)) as client:
        engine.serve("moved", versions[1])  # while the thread is idle
        shutil.rmtree(folders["replaced"])
        shutil.copytree(versions[1], folders["replaced"])
        card = read_card(folders["replaced"]).model_copy(update={"rule": "replaced"})
        card.save(folders["replaced"])
        replaced = client.post("/admin/rules/replaced").json()["weights_sha256"]
        assert client.post("/v1/check", json=BODY).status_code == 200
        kill(engines[0], is_clearable=is_clearable)
        killed = client.post("/v1/check", json=BODY | {"messages": MESSAGES[:1]})
        assert (killed.status_code, killed.json()["verdict"]) == (503, "unjudged")
        answer = check_until_served(client).json()
        assert len(engines) == 2
        for result in answer["results"]:
            assert result["p_violation"] == pytest.approx(expected(versions[1]), abs=TOLERANCE)
        served = {rule["rule"]: rule["weights_sha256"] for rule in client.get("/v1/rules").json()}
        assert served == {"replaced": replaced, "moved": replaced}


@pytest.mark.slow
def test_an_engine_that_does_not_start_leaves_its_rules_and_folders_known(
    versions: list[Path],
) -> None:
    starts: list[Mapping[str, Path]] = []

    def start(moved: Mapping[str, Path] | None) -> GuardEngine:
        starts.append(dict(moved or {}))
        if len(starts) == 2:
            raise RuntimeError("the device is gone")
        return GuardEngine(small_recipe(), {"medical": versions[0]})

    with RestartableEngine(start) as engine:
        assert engine.works() and engine.is_usable
        with pytest.raises(GuardError, match="cannot be started again: the device is gone"):
            engine.restart()
        assert not engine.is_usable and list(engine.rules) == ["medical"]
        assert engine.folder("medical") == versions[0]
        with pytest.raises(GuardError, match="no folder"):
            engine.folder("other")
        for use in (engine.step, lambda: engine.open_check(CONVERSATION), lambda: engine.counters):
            with pytest.raises(Overloaded, match="the engine is down"):
                use()
        engine.restart()
        assert engine.works() and engine.is_usable
        assert starts == [{}, {"medical": versions[0]}, {"medical": versions[0]}]
