"""Who may see and do what in the console, and that nothing that it shows is run."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from guard.layout import Runs
from serve.api.input.limits import MAX_FORM_BYTES
from serve.api.observe.traffic import Series
from serve.console import add_console
from serve.console.rules import SeenVersion, noticed
from serve.registry.registry import RegisteredRule
from serve.tenants.admin import Admin
from serve.tenants.sessions import IDLE_S, LONGEST_S, Sessions
from tests.serve.cluster.words_cluster import REPLICA, LocalCluster, body
from tests.serve.console.conftest import HOSTILE, RULE, ServedConsole, Start, save_replay
from tests.waiting import wait_until

RULE_PAGE = f"/console/rules/{RULE}"


def decide(console: ServedConsole, action: str, **fields: str) -> httpx.Response:
    """Send a form of the rule's page, which names the champion of now unless another is stated."""
    if action != "mode":
        fields = {"champion": console.kept.champion(RULE)} | fields
    fields = {"reason": "a good one"} | fields
    return console.post(f"{RULE_PAGE}/{action}", RULE_PAGE, **fields)


def test_without_an_admin_s_key_every_page_leads_to_the_login(start: Start) -> None:
    console = start()
    for path in ("", "/reviews", "/replays", "/try", "/rules/x", "/versions/0000"):
        answer = console.client.get(f"/console{path}")
        assert (answer.status_code, answer.headers["location"]) == (303, "/console/login")
        assert "default-src 'none'" in answer.headers["content-security-policy"]
    for key in ("shop", "nobody"):
        assert console.sign_in(key).status_code == 403
        assert console.client.get("/console").status_code == 303
    # Nor does who has no key keep others from being checked.
    assert (
        console.client.post("/console/login", content=bytes(MAX_FORM_BYTES + 1)).status_code == 413
    )
    before = console.client.cookies["centurion_console"]
    answer = console.sign_in("viewer")
    assert answer.headers["location"] == "/console"
    for said in ("HttpOnly", "SameSite=strict", "Path=/console"):
        assert said in answer.headers["set-cookie"]
    assert console.client.cookies["centurion_console"] != before
    page = console.client.get("/console")
    assert RULE in page.text and page.headers["cache-control"] == "no-store"
    # A header's key is none of a person, and no cookie's session is one of the API.
    assert console.client.get("/admin/rules").status_code == 401
    console.post("/console/logout", "/console")
    assert console.client.get("/console").status_code == 303


def test_a_form_without_the_token_of_its_session_does_nothing(start: Start) -> None:
    console = start()
    console.sign_in("publisher")
    version = console.versions[1]
    for token in ("", "0" * 64, "ü"):
        answer = decide(console, "publish", version=version, token=token)
        assert answer.status_code == 403 and "form" in answer.text
    assert console.client.post("/console/logout").status_code == 403
    assert console.client.get("/console").status_code == 200
    assert console.kept.champion(RULE) != version


@pytest.mark.parametrize("role", ["viewer", "reviewer", "publisher"])
def test_a_role_is_shown_what_it_may_do_and_refused_the_rest(start: Start, role: str) -> None:
    console = start()
    console.review_later(1)
    console.sign_in(role)
    may_publish, may_review = role == "publisher", role != "viewer"
    assert ("/publish" in console.client.get(RULE_PAGE).text) == may_publish
    assert ('value="violation"' in console.client.get("/console/reviews").text) == may_review
    third = console.versions[2]
    fields = {"request_id": "request-0", "conversation": "0", "rule": RULE}
    vote = {"label": "allow", "skip": "0"} | fields
    for status, is_allowed in (
        (console.post("/console/reviews", "/console", **vote).status_code, may_review),
        (decide(console, "mode", version=third, mode="shadow").status_code, may_publish),
        (decide(console, "publish", version=third).status_code, may_publish),
        (decide(console, "rollback").status_code, may_publish),
    ):
        assert status == (303 if is_allowed else 403)
    assert len(console.store.settled(RULE)) == may_review
    kinds = [event.kind for event in console.kept.registry.events()][4:]
    assert kinds == (["mode_set", "published", "rolled_back"] if may_publish else [])
    if may_publish:
        assert console.kept.registry.events()[-1].actor == "publisher-1"


def test_what_another_person_decided_meanwhile_is_not_replaced(start: Start) -> None:
    console = start()
    console.sign_in("publisher")
    first, second, third = console.versions
    assert decide(console, "publish", version=second).status_code == 303
    late = decide(console, "publish", version=third, champion=first)
    assert late.status_code == 409 and "champion" in late.text
    assert decide(console, "publish", version=third, reason=" ").status_code in (409, 422)
    assert decide(console, "mode", version=third, mode="loud").status_code == 422
    assert console.kept.champion(RULE) == second


def test_what_people_and_conversations_say_is_shown_and_never_run(start: Start) -> None:
    console = start()
    console.review_later(1)
    save_replay(console.kept)
    console.sign_in("publisher")
    second = console.versions[1]
    decide(console, "mode", version=second, mode="shadow", reason=HOSTILE)
    card = f"/console/versions/{second[:12]}"
    pages = [RULE_PAGE, card, "/console/reviews", "/console/replays/replay"]
    texts = [console.client.get(page).text for page in pages]
    typed = {"rule": RULE, "text": f"user: {HOSTILE}"}
    texts.append(console.post("/console/try", "/console/try", **typed).text)
    for text in texts:
        assert "&lt;script&gt;alert" in text and HOSTILE not in text
    for path in ("/console/replays/%2e%2e", "/console/static/..%2fsite.py", "/console/versions/00"):
        assert console.client.get(path).status_code == 404
    assert "text/css" in console.client.get("/console/static/console.css").headers["content-type"]


def test_a_typed_conversation_is_judged_by_champion_and_trial_and_not_counted(start: Start) -> None:
    console = start()
    console.sign_in("publisher")
    third = console.versions[2]
    decide(console, "mode", version=third, mode="shadow")
    for typed in ("user: it violates\nmuch", '[{"role": "user", "content": "it violates"}]'):
        answer = console.post("/console/try", "/console/try", rule=RULE, text=typed)
        assert answer.text.count(">violation</strong>") == 2
    for typed in ("no speaker", "[1", '{"messages": []}'):
        assert (
            console.post("/console/try", "/console/try", rule=RULE, text=typed).status_code == 422
        )
    assert 'class="n">0</td>' in console.client.get("/console").text


def test_whoever_is_on_this_machine_needs_no_key_where_there_are_no_tenants(start: Start) -> None:
    console = start(has_tenants=False)
    body = {"messages": [{"role": "user", "content": "it violates"}]}
    for _ in range(3):
        assert console.client.post("/v1/check", json=body).json()["verdict"] == "violation"
    page = console.client.get("/console").text
    assert 'class="n">3</td><td class="n">100.0 %</td>' in page and "Sign out" not in page
    for headers in ({"host": "evil.example"}, {"x-forwarded-for": "1.2.3.4"}):
        assert console.client.get("/console", headers=headers).status_code == 403
    second = console.versions[1]
    assert decide(console, "publish", version=second).status_code == 303
    wait_until(lambda: second[:12] in console.client.get("/console").text)


def test_what_somebody_should_look_at_is_said_on_top(start: Start) -> None:
    console = start()
    console.sign_in("publisher")
    assert "Needs attention" not in console.client.get("/console").text
    second, third = console.versions[1:]
    decide(console, "mode", version=third, mode="shadow")
    rollout = console.kept.find(RULE)
    assert rollout is not None and rollout.trial is not None
    rule = RegisteredRule("tiny", RULE, "alora")
    console.kept.registry.abort(rule, rollout.trial, actor="gate", reason="it flagged too much")
    page = console.client.get("/console").text
    assert f"The trial of {third[:12]} was taken back: it flagged too much." in page
    console.kept.registry.publish(rule, second, actor="ann", reason="better")
    page = console.client.get("/console").text
    assert "is not served here yet" in page and "taken back" not in page
    assert not list(noticed(SeenVersion(third, "enforce", Series.empty())))
    quarters = Series.empty().quarters
    quarters[:, 0], quarters[-1] = 100, (100, 60, 30, 0, 0)
    said = list(noticed(SeenVersion(third, "enforce", Series(quarters))))
    assert "no verdict at 8%" in said[0] and "flagged 16.2% in the last hour, 0.0%" in said[1]


def test_of_replicas_all_are_counted(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path)
    add_console(cluster._app, Runs(tmp_path / "runs"))
    with cluster.client() as client:
        answers = [client.post("/v1/check", json=body(f"{n} violates")) for n in range(12)]
        assert len({answer.headers[REPLICA] for answer in answers}) == 2
        page = client.get("/console").text
        assert "Ready" in page and page.count('class="n">12</td><td class="n">100.0 %</td>') == 4


def test_a_session_ends_after_an_idle_hour_and_after_twelve_hours() -> None:
    now = [0.0]
    sessions = Sessions(lambda: now[0])
    idle, busy = (sessions.begin(Admin("ann")) for _ in range(2))
    for _ in range(int(LONGEST_S / IDLE_S * 2)):
        now[0] += IDLE_S / 2
        assert sessions.admin(busy) == Admin("ann")
    assert sessions.admin(idle) is None
    now[0] += 1
    assert sessions.admin(busy) is None
