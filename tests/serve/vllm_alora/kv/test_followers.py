"""A conversation's rules are admitted as a group, and answer as if each had come alone. Requests go
ahead by what the prefix cache holds of them, where priorities are a clock; that nobody waits for
ever because of it: tests/serve/engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pytest import MonkeyPatch
from vllm import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.request import Request, RequestStatus
from vllm_alora.adapter import read_adapter
from vllm_alora.handover import ActivatedRequest, activated
from vllm_alora.kv import followers
from vllm_alora.kv.followers import follow, groups_of
from vllm_alora.kv.resident import RESIDENT_FIRST
from vllm_alora.shared_prompt import Prefix, SharedPrompt

from guard.conversation.example import Message
from serve.engine import Call, Score, ScoreRequest
from tests.serve.adapters import save_variant
from tests.serve.cards import RULE_TEXTS
from tests.serve.engine.shared import core_of, steps_of
from tests.serve.guarded import guard_engine
from tests.serve.served import BLOCK, SAMPLED_IDS, Served
from tests.serve.vllm_alora.checked_engine import invocation_of, text_ids

pytestmark = pytest.mark.slow

NATS = 1e-4
ALORAS = ("first", "second", "third", "fourth", "fifth", "sixth")

Rule = tuple[str, tuple[int, ...]]  # an aLoRA, and what its suffix has behind the invocation


def plain(*names: str) -> tuple[Rule, ...]:
    """Rules whose suffix is the invocation."""
    return tuple((name, ()) for name in names)


tails = st.lists(st.integers(300, 12000), max_size=BLOCK + 3).map(tuple)
rules = st.tuples(st.sampled_from(ALORAS), tails)
conversations = st.tuples(
    st.integers(0, 2),  # the seed of its text
    st.integers(1, 3 * BLOCK),  # tokens
    st.lists(rules, min_size=1, max_size=6, unique_by=lambda rule: rule[0]),
    st.none() | st.just("salt"),
)


@pytest.fixture(scope="module")
def adapters(adapters: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Those of all tests, and ALORAS."""
    folder, source = tmp_path_factory.mktemp("aloras"), adapters["first"]
    of_ours = {name: save_variant(folder / name, source, seed=ord(name[2])) for name in ALORAS}
    return adapters | of_ours


class Asking:
    """Requests of conversations to one engine, as our backend makes them."""

    def __init__(self, served: Served, adapters: dict[str, str], *, in_groups: bool) -> None:
        self.served = served
        self.in_groups = in_groups
        self.steps: list[int] = []  # the tokens of each
        self.answers: dict[str, tuple[torch.Tensor, int]] = {}
        self.followed: list[str] = []
        self._adapters = adapters
        self._params = SamplingParams(
            max_tokens=1, temperature=0.0, logprob_token_ids=SAMPLED_IDS, detokenize=False
        )

    def queue(
        self,
        number: int,
        seed: int,
        tokens: int,
        rules: Sequence[Rule],
        salt: str | None = None,
        priority: int = 0,
    ) -> list[str]:
        """Queue a request for every rule on a conversation; their ids."""
        scheduler, leader, prefix = self.served.scheduler, None, Prefix(text_ids(tokens, seed))
        ids = [f"{number}.{index}" for index in range(len(rules))]
        for request_id, (adapter, tail) in zip(ids, rules, strict=True):
            prompt = SharedPrompt(prefix, [*invocation_of(self._adapters[adapter]), *tail])
            lora = self.lora(adapter, tokens)
            is_led = self.in_groups and leader is not None
            if is_led and follow(
                scheduler, leader, request_id, prompt, lora, priority, self._params
            ):
                self.followed.append(request_id)
                continue
            leader = self.request(request_id, prompt, lora, salt, priority)
            self.served.core.add_request(leader)
        return ids

    def lora(self, name: str, start: int) -> Any:
        """What a request of the adapter has that acts from `start` on."""
        folder = self._adapters[name]
        content = read_adapter(folder).content
        return activated(self.served.core, self.served.request(folder), start, content)

    def request(
        self, request_id: str, prompt: Any, lora: Any, salt: str | None = None, priority: int = 0
    ) -> Request:
        return Request(
            request_id,
            prompt,
            self._params,
            None,
            lora_request=lora,
            cache_salt=salt,
            priority=priority,
            block_hasher=self.served.core.request_block_hasher,
        )

    def step(self) -> None:
        """One step; what it answers."""
        before = getattr(self.served.runner, "scheduled_tokens", 0)
        outputs, _ = self.served.core.step_fn()
        self.steps.append(self.served.runner.scheduled_tokens - before)
        for output in outputs.get(0, None).outputs if outputs else []:
            ids = output.new_logprobs.logprob_token_ids[0].tolist()
            values = dict(zip(ids, output.new_logprobs.logprobs[0].tolist(), strict=True))
            log_probs = torch.tensor([values[token] for token in SAMPLED_IDS])
            self.answers[output.request_id] = log_probs, output.prefill_stats.num_cached_tokens

    def finish(self, most_steps: int = 200) -> None:
        """Steps until nothing is left to answer."""
        while self.served.scheduler.has_requests():
            self.step()
            assert len(self.steps) < most_steps, "somebody waits for ever"


@pytest.fixture
def asking(served: Served, adapters: dict[str, str]) -> Asking:
    return Asking(served, adapters, in_groups=True)


def assert_nothing_left(asking: Asking) -> None:
    """Neither a request nor a group, nor a block that anybody holds."""
    scheduler = asking.served.scheduler
    assert not scheduler.has_unfinished_requests() and not groups_of(scheduler)
    assert set(cache_state(asking.served)[0][1:]) == {0}


def cache_state(served: Served) -> tuple[list[int], set[Any]]:
    """The references to all blocks, and the names of those in the prefix cache."""
    blocks = served.scheduler.kv_cache_manager.block_pool.blocks
    names = {block.block_hash for block in blocks if block.block_hash is not None}
    return [block.ref_cnt for block in blocks], names


@settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        conversations,
        min_size=1,
        max_size=4,
        unique_by=lambda asked: (asked[0], asked[1], asked[3]),
    ),
    st.sampled_from([8192, 150, 40]),
    st.integers(1, 2),
    st.sampled_from([0, 0, 60, None]),
)
def test_whatever_is_asked_a_group_answers_as_its_requests_do_alone(
    session_engine: Served,
    adapters: dict[str, str],
    asked: list[Any],
    step_tokens: int,
    times: int,
    in_step_above: int | None,
) -> None:
    """In one step or many, new and again, whether or not a step may share what it computes."""
    folders = [adapters[name] for name in ALORAS]
    # Who comes first while its adapter is being read depends on the disk.
    session_engine.ask([[*text_ids(BLOCK, 9), *invocation_of(path)] for path in folders], folders)
    asked_ways, states = [], []
    for in_groups in (True, False):
        session_engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        session_engine.reset()
        session_engine.limit_step(step_tokens)
        connector = session_engine.scheduler.connector
        may_share, connector._in_step_above = connector._in_step_above, in_step_above
        asking = Asking(session_engine, adapters, in_groups=in_groups)
        for time in range(times):
            for number, conversation in enumerate(asked):
                asking.queue(number + len(asked) * time, *conversation)
            asking.finish()
        connector._in_step_above = may_share
        asked_ways.append(asking.answers)
        states.append(cache_state(session_engine))
    together, alone = asked_ways
    assert together.keys() == alone.keys()
    # What conversations that begin alike have of each other depends on who meets in a step.
    is_each_its_own = len({seed for seed, *_ in asked}) == len(asked)
    for request_id, (log_probs, cached) in together.items():
        log_probs_alone, cached_alone = alone[request_id]
        assert (log_probs - log_probs_alone).abs().max() <= NATS, request_id
        assert cached == cached_alone or not is_each_its_own, request_id
    assert states[0] == states[1]
    session_engine.reset()


def test_a_conversation_and_its_rules_are_one_step(
    asking: Asking, adapters: dict[str, str], monkeypatch: MonkeyPatch
) -> None:
    """And vLLM's scheduler plans the leader alone, or the group would have brought nothing."""
    looked_up: list[str] = []
    manager = asking.served.scheduler.kv_cache_manager
    allocate = manager.allocate_slots

    def counted(request: Any, *args: Any, **kwargs: Any) -> Any:
        looked_up.append(request.request_id)
        return allocate(request, *args, **kwargs)

    monkeypatch.setattr(manager, "allocate_slots", counted)
    names = ("first", "second", "first")
    tokens = 2 * BLOCK + 9
    asking.queue(0, 3, tokens, plain(*names))
    assert asking.followed == ["0.1", "0.2"]
    asking.finish()
    suffixes = sum(len(invocation_of(adapters[name])) for name in names)
    assert [step for step in asking.steps if step] == [tokens + suffixes]
    assert [cached for _, cached in asking.answers.values()] == [0, 73, 73]
    assert looked_up == ["0.0"]


def test_room_of_a_step_is_kept_for_the_followers_of_those_whose_turn_it_is(asking: Asking) -> None:
    """A later conversation does not take it."""
    asking.served.limit_step(120)
    for number in (0, 1):
        asking.queue(number, 5 + number, 80, plain("first", "second"))
    asking.step()
    assert set(asking.answers) == {"0.0", "0.1"}
    asking.finish()
    assert set(asking.answers) == {"0.0", "0.1", "1.0", "1.1"}


@pytest.fixture
def by_priority(asking: Asking, monkeypatch: MonkeyPatch) -> Asking:
    """With the guard engine's policy: a virtual time, ahead by what is cached."""
    scheduler = asking.served.scheduler
    monkeypatch.setattr(scheduler, "policy", SchedulingPolicy.PRIORITY)
    monkeypatch.setattr(scheduler, "waiting", create_request_queue(SchedulingPolicy.PRIORITY))
    config = scheduler.vllm_config
    ours = {**(config.additional_config or {}), RESIDENT_FIRST: True}
    monkeypatch.setattr(config, "additional_config", ours)
    return asking


def test_those_left_behind_go_next_before_whoever_came_later(by_priority: Asking) -> None:
    """Of a conversation longer than a step, whose last part leaves room for one of five."""
    by_priority.served.limit_step(200)
    tail = tuple(range(300, 330))
    asked = tuple((name, tail) for name in ALORAS)
    first = by_priority.queue(0, 11, 330, asked)
    for number in (1, 2, 3):
        by_priority.queue(number, 11 + number, 150, asked[:2], priority=number)
    for _ in range(3):
        by_priority.step()
    assert set(first) <= set(by_priority.answers)
    assert not any(request_id.startswith(("2.", "3.")) for request_id in by_priority.answers)
    by_priority.finish()
    assert len(by_priority.answers) == len(ALORAS) + 6


def test_no_room_is_kept_for_followers_whose_turn_it_is_not(by_priority: Asking) -> None:
    """A long prompt that is being computed goes on in full steps."""
    by_priority.served.limit_step(100)
    by_priority.queue(0, 21, 395, plain("first"))
    by_priority.step()
    by_priority.queue(1, 22, 40, plain(*ALORAS), priority=1)
    by_priority.step()
    by_priority.step()
    assert by_priority.steps == [100, 100, 100]
    by_priority.finish()


@pytest.mark.parametrize("when", ["planned", "admitted"])
def test_scheduler_errors_leave_nothing(
    asking: Asking, monkeypatch: MonkeyPatch, when: str
) -> None:
    """Neither a smaller step, nor a request that cannot be cancelled, nor its blocks."""
    scheduler = asking.served.scheduler
    limits = scheduler.max_num_scheduled_tokens, scheduler.max_num_active_reqs

    def fail(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    ids = asking.queue(0, 24, 70, plain("first", "second", "third"))
    failing = {
        "planned": (scheduler.kv_cache_manager, "allocate_slots"),
        "admitted": (followers.PlannedStep, "_put"),
    }
    with monkeypatch.context() as patch:
        patch.setattr(*failing[when], fail)
        with pytest.raises(KeyboardInterrupt):
            asking.step()
    assert (scheduler.max_num_scheduled_tokens, scheduler.max_num_active_reqs) == limits
    asking.served.core.abort_requests(ids)
    assert_nothing_left(asking)


@pytest.mark.parametrize(
    ("dropped", "steps"), [(["0.0"], 0), (["0.0"], 1), (["0.1"], 0), (["0.0", "0.2"], 0), (None, 0)]
)
def test_those_cancelled_take_nobody_along(
    asking: Asking, dropped: list[str] | None, steps: int
) -> None:
    """Waiting, or amid the conversation; None: all that is in the scheduler."""
    asking.served.limit_step(40)
    ids = asking.queue(0, 7, 70, plain("first", "second", "first"))
    for _ in range(steps):
        asking.step()
    asking.served.scheduler.finish_requests(dropped, RequestStatus.FINISHED_ABORTED)
    if dropped is None:
        assert not asking.served.scheduler.has_unfinished_requests()
    asking.finish()
    assert set(asking.answers) == set(ids) - set(ids if dropped is None else dropped)
    assert_nothing_left(asking)


@pytest.mark.parametrize(
    ("waits", "steps", "answered"), [("0.0", 2, {"0.1", "0.2"}), ("0.1", 1, {"0.0", "0.2"})]
)
def test_who_waits_for_an_adapter_holds_nobody_up(
    asking: Asking, monkeypatch: MonkeyPatch, waits: str, steps: int, answered: set[str]
) -> None:
    """Neither the leader nor a follower; it comes later."""
    connector = asking.served.scheduler.connector
    has_adapter = connector.has_adapter
    is_read = False

    def unread(request: Any) -> bool:
        return bool((is_read or request.request_id != waits) and has_adapter(request))

    monkeypatch.setattr(connector, "has_adapter", unread)
    ids = asking.queue(0, 8, 70, plain("first", "second", "third"))
    for _ in range(steps):
        asking.step()
    assert set(asking.answers) == answered
    is_read = True
    asking.finish()
    assert set(asking.answers) == set(ids)


@pytest.mark.parametrize(
    ("limit", "answered"),
    [("max_loras", {"0.0", "0.2"}), ("max_num_active_reqs", {"0.0", "0.1"}), ("blocks", {"0.0"})],
)
def test_no_more_go_into_a_step_than_it_has_room_for(
    asking: Asking, monkeypatch: MonkeyPatch, limit: str, answered: set[str]
) -> None:
    scheduler = asking.served.scheduler
    manager = scheduler.kv_cache_manager
    free = manager.block_pool.get_num_free_blocks()
    limits = {
        "max_loras": (scheduler.lora_config, limit, 1),
        "max_num_active_reqs": (scheduler, limit, 2),
        "blocks": (manager, "watermark_blocks", free - 4),
    }
    ids = asking.queue(0, 9, 70, plain("first", "second", "first"))
    with monkeypatch.context() as patch:
        patch.setattr(*limits[limit])
        asking.step()
    assert answered <= set(asking.answers) < set(ids)
    asking.finish()
    assert set(asking.answers) == set(ids)


def leader_of(asking: Asking, adapters: dict[str, str]) -> tuple[Request, SharedPrompt, Any]:
    """A queued leader, and the arguments of one that may follow it."""
    asking.queue(0, 10, 70, plain("first"))
    leader = asking.served.scheduler.requests["0.0"]
    prompt = SharedPrompt(leader.prompt_token_ids.prefix, invocation_of(adapters["second"]))
    return leader, prompt, asking.lora("second", 70)


def test_a_follower_is_what_vllm_itself_makes(asking: Asking, adapters: dict[str, str]) -> None:
    leader, prompt, lora = leader_of(asking, adapters)
    follower = followers._follower(leader, "1", prompt, lora, 70 // BLOCK)
    made = asking.request("1", prompt, lora)
    of_its_own = {"arrival_time", "sampling_params", "_block_hasher", "priority"}
    unlike = {"output_token_ids", "all_token_ids"}  # compare by identity
    assert vars(follower).keys() == vars(made).keys()
    for name, value in vars(made).items():
        got = vars(follower)[name]
        if name in unlike:
            assert [*got] == [*value]
        elif name not in of_its_own:
            assert got == value, name
        is_shared = got is vars(leader)[name]
        if is_shared and name != "sampling_params":
            assert not isinstance(got, list | dict | set), f"{name} is the leader's"
    for request in (leader, follower):
        request.append_output_token_ids(7)
    assert len(follower.all_token_ids) == len(made.all_token_ids) + 1
    asking.served.core.abort_requests(["0.0"])


def test_who_cannot_follow_is_not_queued(
    asking: Asking, adapters: dict[str, str], monkeypatch: MonkeyPatch
) -> None:
    """Requests that differ in more than the suffix, and of other engines."""
    leader, prompt, lora = leader_of(asking, adapters)
    scheduler = asking.served.scheduler

    def follows(leader: Request, prompt: SharedPrompt = prompt, lora: Any = lora) -> bool:
        return follow(scheduler, leader, "1", prompt, lora, 0, leader.sampling_params)

    for other in (None, asking.served.request(adapters["lora"]), asking.lora("second", 71)):
        assert not follows(leader, lora=other)
    assert not follows(leader, SharedPrompt(Prefix([*prompt.prefix.token_ids]), prompt[70:]))
    plain_leader = asking.request("2", prompt, asking.lora("lora", 0))
    assert isinstance(plain_leader.lora_request, ActivatedRequest)
    assert not follows(plain_leader)
    for holder, name, value in (
        (scheduler, "connector", None),
        (scheduler, "log_stats", True),
        (scheduler, "__class__", AsyncScheduler),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(holder, name, value)
            assert not follows(leader), name
    assert not groups_of(scheduler)
    assert follows(leader)
    asking.served.core.abort_requests(["0.0", "1"])
    assert not follows(leader)
    assert_nothing_left(asking)


WORDS = 600  # more than a step
ADAPTERS = {"lora": "plain", "alora": "pii_leak", None: None}
CONVERSATION = (Message("user", "word " * WORDS),)


@pytest.fixture(params=[True, False], ids=["on", "off"])
def is_on(request: pytest.FixtureRequest, monkeypatch: MonkeyPatch) -> Iterator[bool]:
    """The seam's setting of the shared engine, which has short steps."""
    engine = guard_engine()
    settings = core_of(engine).vllm_config.additional_config
    monkeypatch.setitem(settings, RESIDENT_FIRST, request.param)
    engine.forget()
    with steps_of(engine, 512):
        yield request.param


def asked_ahead(adapter: str | None, salt: str | None = None) -> tuple[Call, int]:
    """A request of the adapter, and how far it is ahead of the clock."""
    engine = guard_engine()
    rule = ScoreRequest(CONVERSATION, RULE_TEXTS["pii_leak"], ADAPTERS[adapter], salt)
    call = engine.submit([rule])
    (request_id,) = call.waiting
    request = core_of(engine).scheduler.requests[request_id]
    return call, engine._dispatcher.virtual_time - int(request.priority)


def answered(call: Call) -> Score:
    while not call.done:
        guard_engine().step()
    (score,) = call.results()
    assert isinstance(score, Score)
    return score


@pytest.mark.parametrize("known_to", [None, "lora", "alora"])
def test_it_goes_ahead_by_the_cached_tokens(known_to: str | None, *, is_on: bool) -> None:
    """The base and aLoRAs find each other's, a LoRA its own, and nobody another salt's."""
    answered(asked_ahead(known_to)[0])
    for adapter in ADAPTERS:
        for salt in (None, "another"):
            call, ahead = asked_ahead(adapter, salt)
            guard_engine().cancel(call)
            is_known = salt is None and (adapter == "lora") == (known_to == "lora")
            assert ahead > WORDS if is_known and is_on else ahead == 0
    call, ahead = asked_ahead(known_to)
    block = guard_engine().backend.block_size
    assert ahead == is_on * (answered(call).cached_tokens // block * block)
