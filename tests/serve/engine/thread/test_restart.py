"""A real engine is killed amid a request and started again by the server, with what it served; and
when an engine is dead.
"""

from __future__ import annotations

import math
import shutil
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx
import pytest

from guard.errors import GuardError
from guard.weights.card import check_rule, load_card, read_card
from serve.api.app import create_app
from serve.engine import GuardEngine
from serve.engine.backend import EngineOutput, Loaded
from serve.engine.engines import GuardEngines
from serve.engine.refusals import Overloaded
from serve.engine.thread.engine_thread import EngineThread
from serve.engine.thread.restart import PAUSES_S, RestartAttempts
from tests.serve.bench.small_engine import small_recipe
from tests.serve.cards import recipe, save_card
from tests.serve.engine.toy import ToyBackend
from tests.serve.guarded import CONVERSATION, peft_logit, save_adapter
from tests.serve.serving import MESSAGES, serving
from tests.waiting import wait_until

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
    with GuardEngines(lambda _: engines) as engine:
        engine.remove("a")
        assert engine.works()
        monkeypatch.setattr(toys[1], "step", lambda: 1 / 0)
        assert not engine.works()


def test_an_engine_that_refuses_every_check_does_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = ToyBackend()
    folders = {"rule": save_adapter(tmp_path / "rule", "rule", seed=1)}
    step = toy.step

    def nan_step() -> list[EngineOutput]:
        return [output._replace(logit=math.nan) for output in step()]

    engine = GuardEngine(recipe(), folders, start_backend=lambda *_: toy)
    with GuardEngines(lambda _: [engine]) as restartable:
        assert restartable.works()
        monkeypatch.setattr(toy, "step", nan_step)
        assert not restartable.works()


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

    def start(moved: Mapping[str, Path] | None) -> list[GuardEngine]:
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
        return [engine]

    def broken() -> None:
        raise GuardError("the device is gone")

    thread = EngineThread(GuardEngines(start))
    thread.check(CONVERSATION, ["rule"])
    wait_until(lambda: thread.failure is not None)
    assert "the device is gone" in str(thread.failure)
    assert still_there == [0, 0, 0]


def test_a_rule_whose_new_weights_cannot_be_served_is_left_out_and_no_other(
    tmp_path: Path,
) -> None:
    folders = {name: save_adapter(tmp_path / name, name, seed=1) for name in ("good", "bad")}
    failed: list[weakref.ref[Model]] = []

    def start(moved: Mapping[str, Path] | None) -> list[GuardEngine]:
        assert all(reference() is None for reference in failed)
        model = Model()
        failed.append(weakref.ref(model))
        return [GuardEngine(recipe(), moved or folders, start_backend=lambda *_: ToyBackend())]

    with GuardEngines(start) as engine:
        weights = folders["bad"] / "adapter_model.safetensors"
        served_before = weights.read_bytes()
        weights.write_bytes(b"")
        for _ in range(2):
            engine.restart()
            assert list(engine.rules) == ["good"] and engine.folder("bad") == folders["bad"]
            with pytest.raises(GuardError, match="the weights are not those of the card"):
                engine.serve("bad")
        check = engine.open_check(CONVERSATION, ["good", "bad"])
        while not check.call.done:
            engine.step()
        assert list(check.result().refused) == ["bad"] and len(check.result().verdicts) == 1
        weights.write_bytes(served_before)
        engine.serve("bad")
        assert list(engine.rules) == ["good", "bad"]


def empty_weights(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"")


def other_prompt(folder: Path) -> None:
    save_card(folder, "bad", prompt_hash="0" * 64)


def other_rule(folder: Path) -> None:
    save_card(folder, "good")


@pytest.mark.parametrize("spoil", [empty_weights, other_prompt, other_rule])
def test_a_rule_that_was_trained_well_meanwhile_is_among_those_of_the_second_start(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    names = ("bad", "good", "again")
    folders = {name: save_adapter(tmp_path / name, name, seed=1) for name in names}
    starts: list[list[str]] = []
    loads: list[int] = []  # how many starts there were before each

    def start(moved: Mapping[str, Path] | None) -> list[GuardEngine]:
        starts.append(list(moved or folders))
        for rule, folder in (moved or folders).items():
            check_rule(read_card(folder), rule, folder)
        return [GuardEngine(recipe(), moved or folders, start_backend=lambda *_: ToyBackend())]

    with GuardEngines(start) as engine:
        save_card(folders["again"], "again", threshold=0.75)
        spoil(folders["bad"])
        engine.restart(lambda: loads.append(len(starts)))
        assert starts == [list(names), list(names), ["good", "again"]]
        assert loads == [1, 2, 3]
        assert list(engine.rules) == ["good", "again"]
        assert engine.rules["again"].threshold == 0.75
        assert engine.folder("bad") == folders["bad"]


def test_where_no_rule_has_what_it_had_before_those_that_can_be_served_are(tmp_path: Path) -> None:
    folders = {name: save_adapter(tmp_path / name, name, seed=1) for name in ("again", "bad")}

    def start(moved: Mapping[str, Path] | None) -> list[GuardEngine]:
        return [GuardEngine(recipe(), moved or folders, start_backend=lambda *_: ToyBackend())]

    with GuardEngines(start) as engine:
        save_card(folders["again"], "again", threshold=0.75)
        empty_weights(folders["bad"])
        engine.restart()
        assert list(engine.rules) == ["again"]
        empty_weights(folders["again"])
        with pytest.raises(GuardError, match="the weights are not those of the card"):
            engine.restart()


class BrittleBackend(ToyBackend):
    """Does not take the rule "bad" amid others, by an error of vLLM's; by itself neither, or, if
    `is_mortal`, it dies of it.
    """

    is_mortal = False

    def load(self, name: str, folder: Path) -> Loaded:
        is_alone = name.startswith("bad (new)")
        if name.startswith("bad") and not (is_alone and self.is_mortal):
            raise RuntimeError("the kernel broke")
        return super().load(name, folder)

    def step(self) -> list[EngineOutput]:
        raise RuntimeError("the kernel broke")

    def scrub(self) -> None:
        raise RuntimeError("the device is gone")


@pytest.mark.parametrize("is_mortal", [False, True])
def test_a_rule_that_breaks_vllm_is_left_out_unless_the_engine_is_dead_of_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    is_mortal: bool,
) -> None:
    monkeypatch.setattr(BrittleBackend, "is_mortal", is_mortal)
    folders = {name: save_adapter(tmp_path / name, name, seed=1) for name in ("good", "bad")}
    backends: list[type[ToyBackend]] = [ToyBackend, BrittleBackend, BrittleBackend, ToyBackend]

    def start(moved: Mapping[str, Path] | None) -> list[GuardEngine]:
        backend = backends.pop(0)
        return [GuardEngine(recipe(), moved or folders, start_backend=lambda *_: backend())]

    with GuardEngines(start) as engine:
        save_card(folders["bad"], "bad", threshold=0.75)
        if is_mortal:
            with pytest.raises(RuntimeError, match="the device is gone"):
                engine.restart()
        else:
            engine.restart()
            (record,) = [record for record in caplog.records if record.exc_info]
            assert record.getMessage() == "the rule bad is left out"
        assert engine.is_usable == (not is_mortal)
        assert list(engine.rules) == ["good"] and engine.folder("bad") == folders["bad"]
        engine.restart()
        assert engine.is_usable and set(engine.rules) == {"good", "bad"}


def test_a_rule_that_was_left_out_can_be_removed(tmp_path: Path) -> None:
    folders = {name: save_adapter(tmp_path / name, name, seed=1) for name in ("good", "bad")}

    def start(moved: Mapping[str, Path] | None) -> list[GuardEngine]:
        return [GuardEngine(recipe(), moved or folders, start_backend=lambda *_: ToyBackend())]

    with GuardEngines(start) as engine:
        shutil.rmtree(folders["bad"])
        engine.restart()
        engine.remove("bad")
        with pytest.raises(GuardError, match="not served"):
            engine.folder("bad")
        engine.restart()
        assert list(engine.rules) == ["good"]


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
    backend = engine.backend
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

    def start(moved: Mapping[str, Path] | None) -> list[GuardEngine]:
        engines.append(GuardEngine(small_recipe(), folders | dict(moved or {})))
        return engines[-1:]

    with GuardEngines(start) as engine, serving(create_app(engine)) as client:
        engine.serve("moved", versions[1])  # while the thread is idle
        shutil.rmtree(folders["replaced"])
        shutil.copytree(versions[1], folders["replaced"])
        card = read_card(folders["replaced"]).model_copy(update={"rule": "replaced"})
        card.save(folders["replaced"])
        replaced = client.post("/admin/rules/replaced").json()["version"]
        assert client.post("/v1/check", json=BODY).status_code == 200
        kill(engines[0], is_clearable=is_clearable)
        killed = client.post("/v1/check", json=BODY | {"messages": MESSAGES[:1]})
        assert (killed.status_code, killed.json()["verdict"]) == (503, "unjudged")
        answer = check_until_served(client).json()
        assert len(engines) == 2
        for result in answer["results"]:
            assert result["p_violation"] == pytest.approx(expected(versions[1]), abs=TOLERANCE)
        served = {rule["rule"]: rule["version"] for rule in client.get("/v1/rules").json()}
        assert served == {"replaced": replaced, "moved": load_card(versions[1]).version}


@pytest.mark.slow
def test_an_engine_that_does_not_start_leaves_its_rules_and_folders_known(
    versions: list[Path],
) -> None:
    starts: list[Mapping[str, Path]] = []

    def start(moved: Mapping[str, Path] | None) -> list[GuardEngine]:
        starts.append(dict(moved or {}))
        if len(starts) == 2:
            raise RuntimeError("the device is gone")
        return [GuardEngine(small_recipe(), {"medical": versions[0]})]

    with GuardEngines(start) as engine:
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
