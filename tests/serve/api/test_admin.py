"""A rule that was trained again is served by its new weights, without a restart."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from httpx import Client

from guard.errors import GuardError
from guard.weights.card import load_card
from serve.api.app import create_app
from serve.api.observe.audit import AuditLog
from serve.engine import GuardEngine
from serve.policy.rule_set import RuleSet
from tests.serve.bench.small_engine import small_recipe
from tests.serve.guarded import CONVERSATION, peft_logit, save_adapter
from tests.serve.serving import MESSAGES, Serve, serving
from tests.serve.toy_engine import ToyEngine
from tests.signed import sign
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

RULE, TEXT = "medical", "The assistant must not give medical advice."
TOLERANCE = 3e-4


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two trainings of one rule, which say different things."""
    root = tmp_path_factory.mktemp("versions")
    return [save_adapter(root / str(seed), RULE, seed=seed, text=TEXT) for seed in (1, 2)]


@pytest.fixture(scope="module")
def engine(versions: list[Path]) -> Iterator[GuardEngine]:
    folder = Path(shutil.copytree(versions[0], versions[0].parent.parent / RULE))
    with GuardEngine(small_recipe(), {RULE: folder}) as engine:
        yield engine


@pytest.fixture
def folder(engine: GuardEngine) -> Path:
    """The rule's folder; `train` puts a version into it."""
    return engine.folder(RULE)


@pytest.fixture
def trained() -> dict[str, Path]:
    return {}


@pytest.fixture
def client(
    engine: GuardEngine, versions: list[Path], trained: dict[str, Path], tmp_path: Path
) -> Iterator[Client]:
    train(engine.folder(RULE), versions[0])
    log = AuditLog(tmp_path / "audit.jsonl")
    with serving(create_app(engine, observers=[log], find_trained=trained.get)) as client:
        assert client.post(f"/admin/rules/{RULE}").status_code == 200
        yield client


def train(folder: Path, version: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(version, folder)


def probability(client: Client) -> float:
    answer = client.post("/v1/check", json={"messages": MESSAGES}).json()
    value: float = answer["results"][0]["p_violation"]
    return value


def expected(versions: list[Path]) -> list[float]:
    """What plain PEFT and the card say of each version."""
    probabilities: list[float] = []
    for version in versions:
        logit = peft_logit(CONVERSATION, TEXT, version)
        probabilities.append(load_card(version).calibration.verdict(RULE, logit).p_violation)
    assert abs(probabilities[0] - probabilities[1]) > 5 * TOLERANCE
    return probabilities


def test_the_rule_answers_by_its_new_weights_and_no_old_block_is_read(
    client: Client, folder: Path, versions: list[Path], tmp_path: Path
) -> None:
    of_version = expected(versions)
    assert probability(client) == pytest.approx(of_version[0], abs=TOLERANCE)
    before = client.get("/v1/rules").json()[0]["version"]
    # One digest names the version everywhere.
    assert before == load_card(folder).version
    assert json.loads((tmp_path / "audit.jsonl").read_text())["rules"][0]["version"] == before
    named = f'guard_rule_info{{rule="{RULE}",version="{before}"}} 1.0'
    assert named in client.get("/metrics").text
    for number in (1, 0, 1):
        train(folder, versions[number])
        answer = client.post(f"/admin/rules/{RULE}").json()
        assert answer["version_before"] == before
        before = answer["version"]
        assert client.get("/v1/rules").json()[0]["version"] == before
        for _ in range(2):  # the second from the cache
            assert probability(client) == pytest.approx(of_version[number], abs=TOLERANCE)


def test_checks_get_one_version(client: Client, folder: Path, versions: list[Path]) -> None:
    of_version = expected(versions)
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(probability, client) for _ in range(60)]
        for number in (1, 0, 1, 0):
            train(folder, versions[number])
            assert client.post(f"/admin/rules/{RULE}").status_code == 200
        values = [answer.result() for answer in answers]
    for value in values:
        assert min(abs(value - probability) for probability in of_version) < TOLERANCE


def test_weights_that_cannot_be_served_change_nothing(client: Client, folder: Path) -> None:
    assert 0 < probability(client) < 1
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    response = client.post(f"/admin/rules/{RULE}")
    assert response.status_code == 409 and str(folder) not in response.text
    assert response.json()["verdict"] == "unjudged"
    other = [{"role": "user", "content": "Something else"}]
    answer = client.post("/v1/check", json={"messages": other}).json()
    assert len(answer["results"]) + len(answer["unjudged"]) == 1


EDITS = [
    ("adapter_config.json", "use_rslora", True),
    ("adapter_config.json", "lora_alpha", 1),
    ("card.json", "threshold", 0.9),
    ("card.json", "temperature", 9.0),
    ("card.json", "uncertainty_band", [0.0, 0.1]),
]


def test_an_edited_folder_is_served_only_once_signed(client: Client, folder: Path) -> None:
    for file, key, value in EDITS:
        before = client.get("/v1/rules").json()
        content = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(content | {key: value}))
        assert client.post(f"/admin/rules/{RULE}").status_code == 409
        assert client.get("/v1/rules").json() == before
        with pytest.raises(GuardError, match=f"the card was edited|card: {file} is another file"):
            GuardEngine(small_recipe(), {RULE: folder})
        sign(folder)
        changed = client.post(f"/admin/rules/{RULE}").json()
        assert changed["version"] == load_card(folder).version != changed["version_before"]


def test_no_rule_is_added_that_is_not_trained_or_not_by_its_own_sound_weights(
    client: Client, folder: Path, trained: dict[str, Path], tmp_path: Path
) -> None:
    broken, foreign = (
        save_adapter(tmp_path / name, name, seed=3) for name in ("broken", "foreign")
    )
    (broken / "adapter_model.safetensors").write_bytes(b"")
    trained |= {"broken": broken, "new": foreign}
    for name in ("nobody", "..", "%2e%2e%2fplain"):
        assert client.post(f"/admin/rules/{name}").status_code == 404
        assert client.delete(f"/admin/rules/{name}").status_code == 404
    for name in trained:
        assert client.post(f"/admin/rules/{name}").status_code == 409
    train(folder, foreign)
    assert client.post(f"/admin/rules/{RULE}").status_code == 409
    assert [rule["rule"] for rule in client.get("/v1/rules").json()] == [RULE]


def test_a_rule_is_added_and_removed_while_others_are_checked(
    client: Client, trained: dict[str, Path], tmp_path: Path
) -> None:
    new = trained["new"] = save_adapter(tmp_path / "new", "new", seed=3)
    before = probability(client)
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(probability, client) for _ in range(20)]
        added = client.post("/admin/rules/new").json()
        assert added["version"] == load_card(new).version
        assert added["version_before"] is None
        both = client.post("/v1/check", json={"messages": MESSAGES}).json()
        removed = client.delete("/admin/rules/new").json()
        assert removed["version_before"] == added["version"]
        assert removed["version"] is None
        values = [answer.result() for answer in answers]
        assert values == pytest.approx([before] * 20, abs=1e-3)
    logit = peft_logit(CONVERSATION, load_card(new).rule_text, new)
    expected_p = load_card(new).calibration.verdict("new", logit).p_violation
    assert [result["rule"] for result in both["results"]] == [RULE, "new"]
    assert both["results"][1]["p_violation"] == pytest.approx(expected_p, abs=TOLERANCE)
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
