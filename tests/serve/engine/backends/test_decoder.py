"""vLLM as a backend of a causal language model: what it is asked."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from pytest import MonkeyPatch
from vllm_alora.kv.followers import groups_of

from serve.engine import GuardEngine
from serve.engine.backend import Backend, BackendRequest
from serve.engine.backends import decoder
from serve.engine.backends.vllm_engine import VllmBackend
from tests.serve.engine.shared import assert_peft, core_of, runner
from tests.serve.guarded import CONVERSATION

pytestmark = pytest.mark.slow


def test_the_decoder_has_every_verb_of_a_backend() -> None:
    """It inherits the protocol, whose empty bodies would answer for a verb that it lacks."""
    verbs = {name for name in vars(Backend) if not name.startswith("_")}
    assert verbs and verbs <= {*vars(VllmBackend), *vars(decoder.DecoderBackend)}


@pytest.mark.parametrize("when", ["before it was queued", "after it was queued"])
def test_requests_that_were_queued_before_an_error_are_not_left_behind(
    engine: GuardEngine, monkeypatch: MonkeyPatch, when: str
) -> None:
    core, calls = core_of(engine), []

    def stumbling(queue: Callable[..., Any]) -> Callable[..., Any]:
        def stumble(*arguments: Any, **named: Any) -> Any:
            calls.append(arguments)
            if len(calls) == 3 and when.startswith("before"):
                raise FileNotFoundError("gone")
            found = queue(*arguments, **named)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return found

        return stumble

    with monkeypatch.context() as patch:
        patch.setattr(core, "add_request", stumbling(core.add_request))
        patch.setattr(decoder, "follow", stumbling(decoder.follow))
        with pytest.raises((FileNotFoundError, KeyboardInterrupt)):
            engine.check(CONVERSATION)
    assert not groups_of(core.scheduler)
    assert not core.scheduler.has_unfinished_requests()
    assert not engine._dispatcher.in_flight


def test_a_step_that_fails_before_it_is_sampled_from_leaves_the_next_one_to_run(
    engine: GuardEngine, monkeypatch: MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(runner(engine), "sample_tokens", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.check(CONVERSATION)
        assert runner(engine).execute_model_state is None
    assert_peft(engine)


def test_both_of_vllm_s_runners_keep_an_unsampled_step_in_one_attribute() -> None:
    """A name that they do not have would be set, and nothing forgotten."""
    for module in ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"):
        source = inspect.getsource(importlib.import_module(module).GPUModelRunner.sample_tokens)
        assert "if self.execute_model_state is None:" in source


@pytest.mark.parametrize(
    ("changed", "may_follow"),
    [
        ({"suffix": [7], "wants_state": True}, True),
        ({"prefix": [1, 2]}, False),  # equal, and another conversation
        ({"cache_salt": "another caller's"}, False),
        ({"virtual_start": 5}, False),
    ],
)
def test_only_a_request_on_the_same_conversation_may_follow_the_one_before(
    engine: GuardEngine, monkeypatch: MonkeyPatch, changed: dict[str, Any], may_follow: bool
) -> None:
    before, leader = BackendRequest([1, 2], [3], None, 2, 0, "salt"), object()
    backend: Any = engine.backend
    monkeypatch.setattr(backend, "_last_queued", (before, leader))
    assert (backend._leader_of(before._replace(**changed)) is leader) == may_follow
