"""What a publisher decides over HTTP is recorded under its name and served at once, or neither; by
one server and by a cluster alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from httpx import Client

from serve.api.app import create_app
from serve.registry import change as change_module
from serve.tenants.admin import Admin
from tests.serve.api.tenants import HEADERS, RULE_SETS, shop_and_bank
from tests.serve.cluster.words_cluster import LocalCluster
from tests.serve.cluster.words_engine import BAD, WordsEngine
from tests.serve.kept import KeptVersions
from tests.serve.serving import serving
from tests.serve.toy_engine import ToyEngine
from tests.waiting import wait_until

RULE = "pii_leak"  # whose file has a gate


@pytest.fixture
def kept(tmp_path: Path) -> KeptVersions:
    kept = KeptVersions(tmp_path)
    kept.train(RULE, b"first")
    return kept


@pytest.fixture(params=["one server", "a cluster"])
def client(request: pytest.FixtureRequest, kept: KeptVersions, tmp_path: Path) -> Iterator[Client]:
    """A server of two rules, of which RULE has versions."""
    if request.param == "a cluster":
        folders = {RULE: kept.registry.folder(kept.champion(RULE))}
        with LocalCluster(tmp_path / "words", source=kept, others=folders).client() as client:
            yield client
        return
    engine: Any = WordsEngine({RULE: kept.registry.folder(kept.champion(RULE))})
    with serving(create_app(engine, source=kept)) as client:
        yield client


def decide(client: Client, action: str, **body: object) -> httpx.Response:
    return client.post(f"/admin/rules/{RULE}/{action}", json={"reason": "better"} | body)


def judging(client: Client) -> tuple[str, str | None]:
    """The version that judges, and the one on trial beside it."""
    (rule,) = (rule for rule in client.get("/admin/rules").json() if rule["rule"] == RULE)
    return rule["champion"]["version"], (rule["trial"] or {}).get("version")


def kinds(kept: KeptVersions) -> list[str]:
    return [event.kind for event in kept.registry.events()]


def test_what_is_published_and_taken_back_is_served_at_once(
    client: Client, kept: KeptVersions
) -> None:
    first, second = kept.champion(RULE), kept.train(RULE, b"second").id
    published = decide(client, "publish").json()
    assert published["version"] == second
    assert published["champion"] == {"version": second, "mode": "enforce"}
    assert judging(client) == (second, None)
    back = decide(client, "rollback", reason="it flags greetings").json()
    assert back["champion"]["version"] == first == judging(client)[0]
    assert kept.registry.events()[-1].reason == "it flags greetings"
    told = client.get(f"/admin/rules/{RULE}").json()
    assert [version["note"] for version in told["versions"]] == ["second", "first"]
    assert told["versions"][1]["aliases"] == ["champion"]
    assert told["versions"][1]["mode"] == "enforce" and told["versions"][0]["mode"] is None
    assert [event["kind"] for event in told["events"]][-2:] == ["published", "rolled_back"]
    assert decide(client, "publish", version=second[:6]).json()["champion"]["version"] == second
    kept.registry.verify()


def test_a_version_that_is_refused_is_taken_back_and_all_is_as_before(
    client: Client, kept: KeptVersions
) -> None:
    first, second = kept.champion(RULE), kept.train(RULE, b"second").id
    decide(client, "publish")
    third, bad = kept.train(RULE, b"third").id, kept.train(RULE, BAD).id
    decide(client, "mode", mode="canary:10%", version=third)
    before = kept.aliases(RULE)
    assert before == {"champion": second, "previous": first, "candidate": bad}
    refused = decide(client, "publish")
    assert refused.status_code == 409 and "cannot be served" in refused.json()["error"]
    assert str(kept.root) not in refused.text
    assert kept.aliases(RULE) == before and judging(client) == (second, third)
    assert kinds(kept)[-3:] == ["published", "rolled_back", "mode_set"]
    assert kept.registry.events()[-1].actor == "the server"
    kept.registry.verify()
    assert decide(client, "rollback").json()["champion"]["version"] == first


def test_a_mode_names_its_version_and_a_trial_that_cannot_be_served_is_over(
    client: Client, kept: KeptVersions
) -> None:
    first, second = kept.champion(RULE), kept.train(RULE, b"second").id
    answer = decide(client, "mode", mode="shadow", version="champion").json()
    assert answer["version"] == first and answer["champion"]["mode"] == "shadow"
    assert decide(client, "mode", mode="shadow").json()["version"] == second
    third = kept.train(RULE, b"third").id
    other = decide(client, "mode", mode="shadow", version=third)
    assert other.status_code == 409 and "another version is on trial" in other.json()["error"]
    assert decide(client, "mode", mode="off", version=second).json()["trial"] is None
    bad = kept.train(RULE, BAD).id
    refused = decide(client, "mode", mode="shadow", version=bad)
    assert refused.status_code == 409 and judging(client) == (first, None)
    wait_until(lambda: kinds(kept)[-1] == "aborted")
    kept.registry.verify()


def test_of_two_who_publish_at_once_one_is_told_that_the_champion_is_another(
    client: Client, kept: KeptVersions
) -> None:
    first = kept.champion(RULE)
    versions = [kept.train(RULE, weights).id for weights in (b"second", b"third")]

    def publish(version: str) -> httpx.Response:
        body = {"reason": "better", "version": version, "champion": first[:12]}
        return httpx.post(f"{client.base_url}/admin/rules/{RULE}/publish", json=body)

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(publish, versions))
    assert sorted(answer.status_code for answer in answers) == [200, 409]
    (late,) = (answer.json()["error"] for answer in answers if answer.status_code == 409)
    assert "the champion is another" in late
    assert judging(client)[0] == kept.champion(RULE) in versions
    again = decide(client, "publish", version=kept.champion(RULE))
    assert again.status_code == 409 and "champion already" in again.json()["error"]


def test_what_is_malformed_or_of_no_version_changes_nothing(
    client: Client, kept: KeptVersions
) -> None:
    before = kinds(kept)
    for action, body, status in (
        ("publish", {}, 409),  # there is no candidate
        ("publish", {"version": "ffff"}, 409),
        ("publish", {"reason": " "}, 422),
        ("publish", {"versions": "candidate"}, 422),
        ("rollback", {}, 409),
        ("mode", {"mode": "on"}, 422),
        ("mode", {"mode": "enforce", "version": "previous"}, 409),
    ):
        refused = decide(client, action, **body)
        assert (refused.status_code, refused.json()["verdict"]) == (status, "unjudged"), body
    unknown = client.post("/admin/rules/nobody/publish", json={"reason": "x"})
    assert unknown.status_code == client.get("/admin/rules/nobody").status_code == 404
    assert kinds(kept) == before


def test_a_publisher_decides_under_its_name_and_two_may_have_to(
    kept: KeptVersions, monkeypatch: pytest.MonkeyPatch
) -> None:
    stated = change_module.load_rule(RULE).model_copy(update={"approvals": 2})
    monkeypatch.setattr(change_module, "load_rule", lambda name: stated)
    first, second = kept.champion(RULE), kept.train(RULE, b"second").id
    engine: Any = WordsEngine({RULE: kept.registry.folder(first)})
    bob_s = {"x-api-key": "bob's key"}

    def publish(headers: dict[str, str], version: str) -> tuple[str, int]:
        body = {"reason": "better", "version": version}
        answer = client.post(f"/admin/rules/{RULE}/publish", json=body, headers=headers).json()
        assert answer["approvals_needed"] == 2
        return answer["champion"]["version"], answer["approvals"]

    tenants = shop_and_bank(Admin("bob", "publisher"))
    with serving(create_app(engine, rule_sets=RULE_SETS, tenants=tenants, source=kept)) as client:
        for role in ("viewer", "reviewer"):
            path = f"/admin/rules/{RULE}"
            assert client.get(path, headers=HEADERS[role]).status_code == 200
            for action, more in (("publish", {}), ("rollback", {}), ("mode", {"mode": "off"})):
                body = {"reason": "x"} | more
                refused = client.post(f"{path}/{action}", json=body, headers=HEADERS[role])
                assert refused.status_code == 403
        for _ in range(2):  # nobody counts twice
            assert publish(bob_s, second) == (first, 1)
        around = {"reason": "better", "version": "candidate"}
        refused = client.post(f"/admin/rules/{RULE}/rollback", json=around, headers=bob_s)
        assert refused.status_code == 409 and "never champion" in refused.json()["error"]
        assert publish(HEADERS["publisher"], second) == (second, 2)
        actors = [(event.kind, event.actor) for event in kept.registry.events()[-2:]]
        assert actors == [("approved", "bob"), ("published", "publisher-1")]
        back = client.post(f"/admin/rules/{RULE}/rollback", json={"reason": "x"}, headers=bob_s)
        assert back.json()["champion"]["version"] == first  # which takes one
        assert publish(HEADERS["publisher"], second) == (first, 1)  # of another champion
    kept.registry.verify()


def test_a_server_without_versions_says_so() -> None:
    engine: Any = ToyEngine({"fine": -2.0})
    with serving(create_app(engine)) as client:
        told = client.get("/admin/rules/fine").json()
        assert (told["versions"], told["events"]) == ([], [])
        refused = client.post("/admin/rules/fine/publish", json={"reason": "better"})
        assert refused.status_code == 409 and "no versions are kept" in refused.json()["error"]
