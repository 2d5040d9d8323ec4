"""A rule that was trained again is served by its new weights, without a restart."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from httpx import Client

from guard.rule import Gate
from guard.weights.card import load_card
from serve.api.app import create_app
from serve.api.observe.audit import AuditLog
from serve.engine import GuardEngine
from serve.policy.rule_set import RuleSet
from serve.registry.rollout import Mode, Rollout, TrialVersion
from tests.serve.bench.small_engine import small_recipe
from tests.serve.found import Found
from tests.serve.guarded import CONVERSATION, peft_logit, save_adapter
from tests.serve.serving import MESSAGES, Serve, serving
from tests.serve.toy_engine import ToyEngine
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

RULE, TEXT = "medical", "The assistant must not give medical advice."
TOLERANCE = 3e-4


class Trained:
    """A rule's folder, two trainings of it that say different things, and what those say."""

    def __init__(self, root: Path) -> None:
        self.folder = root / RULE
        self.versions: list[Path] = []
        self.probabilities: list[float] = []  # by plain PEFT and the card
        for seed in (1, 2):
            version = save_adapter(root / str(seed), RULE, seed=seed, text=TEXT)
            self.versions.append(version)
            logit = peft_logit(CONVERSATION, TEXT, version)
            self.probabilities.append(load_card(version).calibration.p_violation(logit))
        assert abs(self.probabilities[0] - self.probabilities[1]) > 5 * TOLERANCE
        self.train(self.versions[0])
        self.others: dict[str, Path] = {}  # rules that are trained and not served

    def train(self, version: Path) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(version, self.folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("versions"))


@pytest.fixture(scope="module")
def engine(trained: Trained) -> Iterator[GuardEngine]:
    with GuardEngine(small_recipe(), {RULE: trained.folder}) as engine:
        yield engine


@pytest.fixture
def client(engine: GuardEngine, trained: Trained, tmp_path: Path) -> Iterator[Client]:
    trained.train(trained.versions[0])
    log = AuditLog(tmp_path / "audit.jsonl")
    app = create_app(engine, observers=[log], source=Found(trained.others.get))
    with serving(app) as client:
        assert client.post(f"/admin/rules/{RULE}").status_code == 200
        yield client


def probability(client: Client) -> float:
    answer = client.post("/v1/check", json={"messages": MESSAGES}).json()
    value: float = answer["results"][0]["p_violation"]
    return value


def test_the_rule_answers_by_its_new_weights_and_no_old_block_is_read(
    client: Client, trained: Trained, tmp_path: Path
) -> None:
    assert probability(client) == pytest.approx(trained.probabilities[0], abs=TOLERANCE)
    before = client.get("/v1/rules").json()[0]["version"]
    # One digest names the version everywhere.
    assert before == load_card(trained.folder).version
    version, line = map(json.loads, (tmp_path / "audit.jsonl").read_text().splitlines())
    assert version["version"] == line["rules"][0]["version"] == before
    named = f'guard_rule_info{{by="alora",rule="{RULE}",version="{before}"}} 1.0'
    assert named in client.get("/metrics").text
    for number in (1, 0):
        trained.train(trained.versions[number])
        answer = client.post(f"/admin/rules/{RULE}").json()
        assert answer["version_before"] == before
        before = answer["version"]
        assert client.get("/v1/rules").json()[0]["version"] == before
        expected = pytest.approx(trained.probabilities[number], abs=TOLERANCE)
        assert probability(client) == expected
        assert probability(client) == expected  # from the cache


def trial_of(folder: Path, mode: str, **gate: float) -> TrialVersion:
    version = load_card(folder).version
    return TrialVersion(version=version, folder=folder, mode=Mode.parse(mode), gate=Gate(**gate))


def test_a_shadow_is_judged_and_audited_and_its_gate_takes_it_back(
    engine: GuardEngine, trained: Trained, tmp_path: Path
) -> None:
    champion, candidate = trained.versions
    trial = trial_of(candidate, "shadow", slower_than=1e-9, least_checks=41)
    found = {RULE: Rollout(folder=champion, trial=trial)}
    source = Found(found.get)
    audit = tmp_path / "audit.jsonl"
    p_champion, p_candidate = trained.probabilities
    body = {"messages": MESSAGES}
    with serving(create_app(engine, observers=[AuditLog(audit)], source=source)) as client:
        for number in range(39):
            answer = client.post("/v1/check", json=body, headers={"x-session-id": str(number)})
            (result,) = answer.json()["results"]
            assert result["p_violation"] == pytest.approx(p_champion, abs=TOLERANCE)
            probability(client)  # of one conversation, which counts once
        said, decided = json.loads(audit.read_text().splitlines()[-1])["on_trial"]
        assert said["p_violation"] == pytest.approx(p_candidate, abs=TOLERANCE)
        assert (said["version"], said["decides"]) == (trial.version, False)
        described = re.findall(
            r'"kind": "version", "time": "[^"]*", "version": "(\w+)"', audit.read_text()
        )
        assert sorted(described) == sorted([trial.version, load_card(champion).version])
        assert (decided["version"], decided["decides"]) == (load_card(champion).version, True)
        assert [rule["rule"] for rule in client.get("/v1/rules").json()] == [RULE]
        counted = f'version="{trial.version}",mode="shadow",decides="false"'.split(",")
        assert all(label in client.get("/metrics").text for label in counted)
        assert source.aborted == [] and len(engine.rules) == 2
        judging = [
            {
                "rule": RULE,
                "champion": {"version": load_card(champion).version, "mode": "enforce"},
                "trial": {"version": trial.version, "mode": "shadow"},
            }
        ]
        assert client.get("/admin/rules").json() == judging
        # A person has published it, and nobody has said so here: nor does the gate.
        found[RULE] = Rollout(folder=candidate)
        client.post("/v1/check", json=body, headers={"x-session-id": "one more"})
        wait_until(lambda: list(engine.rules) == [RULE])
        assert client.get("/admin/rules").json() == [judging[0] | {"trial": None}]
        ((rule, version, reason),) = source.aborted
        assert (rule, version) == (RULE, trial.version) and "too slow" in reason
        assert probability(client) == pytest.approx(p_champion, abs=TOLERANCE)
        assert "on_trial" not in audit.read_text().splitlines()[-1]
    engine.serve(RULE, trained.folder)


def test_a_canary_decides_in_every_format_and_a_rule_in_shadow_allows(
    engine: GuardEngine, trained: Trained
) -> None:
    champion, candidate = trained.versions
    found = {RULE: Rollout(folder=champion, trial=trial_of(candidate, "canary:99%"))}
    body = {"messages": MESSAGES}
    chat = body | {"model": RULE, "logprobs": True}
    with serving(create_app(engine, source=Found(found.get))) as client:
        assert probability(client) == pytest.approx(trained.probabilities[1], abs=TOLERANCE)
        found[RULE] = Rollout(folder=champion, mode=Mode.parse("shadow"))
        assert client.post(f"/admin/rules/{RULE}").json()["version"] == load_card(champion).version
        answer = client.post("/v1/check", json=body).json()
        assert (answer["verdict"], answer["results"], answer["unjudged"]) == ("allow", [], [])
        assert answer["decided_by"] == [] and client.get("/v1/rules").json()[0]["mode"] == "shadow"
        assert answer["usage"]["computed_tokens"] > 0
        said = client.post("/v1/chat/completions", json=chat).json()["choices"][0]
        assert said["message"]["content"] == "no"
        assert client.post("/v1/moderations", json={"input": "Hi"}).json()["results"][0] == {
            **{"flagged": False, "categories": {}, "category_scores": {}},
            "category_applied_input_types": {},
        }
        found[RULE] = Rollout(folder=champion, mode=Mode.parse("off"))
        client.post(f"/admin/rules/{RULE}")
        answer = client.post("/v1/check", json=body).json()
        assert (answer["verdict"], answer["usage"]["computed_tokens"]) == ("allow", 0)
    engine.serve(RULE, trained.folder)


def test_checks_get_one_version(client: Client, trained: Trained) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(probability, client) for _ in range(40)]
        for number in (1, 0, 1, 0):
            trained.train(trained.versions[number])
            assert client.post(f"/admin/rules/{RULE}").status_code == 200
        values = [answer.result() for answer in answers]
    for value in values:
        assert min(abs(value - expected) for expected in trained.probabilities) < TOLERANCE


def test_weights_that_cannot_be_served_change_nothing(client: Client, trained: Trained) -> None:
    assert 0 < probability(client) < 1
    weights = trained.folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])  # nor is an edited card (test_card.py)
    response = client.post(f"/admin/rules/{RULE}")
    assert response.status_code == 409 and str(trained.folder) not in response.text
    assert response.json()["verdict"] == "unjudged"
    assert 0 < probability(client) < 1


def test_no_rule_is_added_that_is_not_trained_or_not_by_its_own_sound_weights(
    client: Client, trained: Trained, tmp_path: Path
) -> None:
    broken = save_adapter(tmp_path / "broken", "broken", seed=3)
    foreign = save_adapter(tmp_path / "foreign", "foreign", seed=3)
    (broken / "adapter_model.safetensors").write_bytes(b"")
    trained.others |= {"broken": broken, "new": foreign}
    for name in ("nobody", "..", "%2e%2e%2fplain"):
        assert client.post(f"/admin/rules/{name}").status_code == 404
        assert client.delete(f"/admin/rules/{name}").status_code == 404
    for name in trained.others:
        assert client.post(f"/admin/rules/{name}").status_code == 409
    trained.train(foreign)
    assert client.post(f"/admin/rules/{RULE}").status_code == 409
    assert [rule["rule"] for rule in client.get("/v1/rules").json()] == [RULE]


def test_a_rule_is_added_and_removed_while_others_are_checked(
    client: Client, trained: Trained, tmp_path: Path
) -> None:
    new = trained.others["new"] = save_adapter(tmp_path / "new", "new", seed=3)
    before = probability(client)
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(probability, client) for _ in range(20)]
        added = client.post("/admin/rules/new").json()
        assert (added["version"], added["version_before"]) == (load_card(new).version, None)
        both = client.post("/v1/check", json={"messages": MESSAGES}).json()
        removed = client.delete("/admin/rules/new").json()
        assert (removed["version_before"], removed["version"]) == (added["version"], None)
        values = [answer.result() for answer in answers]
        assert values == pytest.approx([before] * 20, abs=1e-3)
    assert [result["rule"] for result in both["results"]] == [RULE, "new"]
    asked = {"messages": MESSAGES, "rules": ["new"]}
    assert client.post("/v1/check", json=asked).status_code == 422
    assert [rule["rule"] for rule in client.get("/v1/rules").json()] == [RULE]


def test_a_rule_of_a_rule_set_and_the_last_rule_stay(serve: Serve) -> None:
    engine = ToyEngine({"fine": -2.0, "flagged": -1.0})
    client = serve(engine, rule_sets={"strict": RuleSet.any_of(["flagged"])})
    of_a_set = client.delete("/admin/rules/flagged")
    assert of_a_set.status_code == 409 and "'strict'" in of_a_set.json()["error"]
    assert client.delete("/admin/rules/fine").status_code == 200
    last = serve(ToyEngine({"fine": -2.0})).delete("/admin/rules/fine")
    assert last.status_code == 409 and "last rule" in last.json()["error"]


def test_a_check_that_began_before_a_rule_was_removed_is_answered_and_told_of(serve: Serve) -> None:
    engine = ToyEngine({"fine": -2.0, "flagged": -1.0})
    engine.may_step.clear()
    client = serve(engine)
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(client.post, "/v1/check", json={"messages": MESSAGES})
        wait_until(lambda: engine.open)
        removed = pool.submit(client.delete, "/admin/rules/flagged")
        time.sleep(0.1)
        engine.may_step.set()
        assert removed.result().status_code == 200
        assert answer.result().json()["decided_by"] == ["flagged"]
