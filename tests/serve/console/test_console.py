"""Who may see and do what in the console, and that nothing that it shows is run."""

from __future__ import annotations

import socket
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import httpx
import pytest

from guard.conversation.example import Message
from guard.layout import Runs
from serve.api.input.limits import MAX_FORMS, MAX_LOGIN_BYTES, MAX_TURNS
from serve.api.keeping import MOST_ASKING
from serve.api.observe.traffic import Series
from serve.console import add_console
from serve.console.rules import SeenVersion, noticed
from serve.registry.registry import RegisteredRule
from serve.registry.reviews import KeptCheck, KeptVerdict
from serve.tenants.admin import Admin
from serve.tenants.sessions import IDLE_S, LONGEST_S, Sessions
from tests.serve.cluster.words_cluster import REPLICA, LocalCluster, body
from tests.serve.console.conftest import HOSTILE, RULE, ServedConsole, Start, save_replay
from tests.waiting import wait_until

SAID = [{"role": "user", "content": "it violates"}]
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
        console.client.post("/console/login", content=bytes(MAX_LOGIN_BYTES + 1)).status_code == 413
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
    save_replay(console.kept)
    console.sign_in(role)
    may_publish, may_review = role == "publisher", role != "viewer"
    assert ("/publish" in console.client.get(RULE_PAGE).text) == may_publish
    for path, shown in (
        ("/console/reviews", 'value="violation"'),
        ("/console/replays", "/console/replays/replay"),
        ("/console/replays/replay", "a quoted conversation"),
    ):
        answer = console.client.get(path)
        assert (answer.status_code == 200, shown in answer.text) == (may_review, may_review)
        assert "default-src 'none'" in answer.headers["content-security-policy"]
    third = console.versions[2]
    (review,) = console.store.queue("ann")
    fields = {"request_id": "request-0", "conversation": review.conversation, "rule": RULE}
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
    console.sign_in("publisher")
    second = console.versions[1]
    decide(console, "mode", version=second, mode="shadow", reason=HOSTILE)
    card = f"/console/versions/{second[:12]}"
    pages = [RULE_PAGE, card, "/console/reviews"]
    texts = [console.client.get(page).text for page in pages]
    assert "too few (4)" in texts[1]  # twins
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
    for typed, status in (("user: it violates\nmuch", 200), ("no speaker", 422), ("user: ", 422)):
        answer = console.post("/console/try", "/console/try", rule=RULE, text=typed)
        assert answer.status_code == status
        assert answer.text.count(">violation</strong>") == 2 * (status == 200)
    assert 'class="n">0</td>' in console.client.get("/console").text


def test_whoever_is_on_this_machine_needs_no_key_where_there_are_no_tenants(start: Start) -> None:
    console = start(has_tenants=False)
    body = {"messages": SAID}
    for _ in range(3):
        assert console.client.post("/v1/check", json=body).json()["verdict"] == "violation"
    page = console.client.get("/console").text
    assert 'class="n">3</td><td class="n">100.0 %</td>' in page and "Sign out" not in page
    for headers in ({"host": "evil.example"}, {"x-forwarded-for": "1.2.3.4"}):
        assert console.client.get("/console", headers=headers).status_code == 403
    second = console.versions[1]
    assert decide(console, "publish", version=second).status_code == 303
    wait_until(lambda: second[:12] in console.client.get("/console").text)
    page = console.client.get(f"{RULE_PAGE}?is_done=1").text
    assert f"{console.versions[0][:12]}, before" in page and ">Done.</strong>" in page
    assert 'action="/console/rules/' + RULE + '/rollback"' in page
    assert decide(console, "rollback").status_code == 303  # which is no toggle
    assert "/rollback" not in console.client.get(RULE_PAGE).text


def test_what_somebody_should_look_at_is_said_on_top(start: Start) -> None:
    console = start()
    console.sign_in("publisher")
    assert "Needs attention" not in console.client.get("/console").text
    first, second, third = console.versions
    for mode, said in (("off", "nothing is judged"), ("shadow", "nothing is decided")):
        decide(console, "mode", version=first, mode=mode)
        assert said in console.client.get("/console").text
    decide(console, "mode", version=first, mode="enforce")
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


def test_pages_are_made_while_a_few_wait_for_a_locked_review_store(start: Start) -> None:
    console = start(has_tenants=False)
    vote = {"rule": RULE, "label": "allow", "reviewer": "ann", "messages": SAID}

    def label(number: int) -> int:
        body = vote | {"request_id": str(number)}
        return console.client.post("/v1/feedback", json=body, timeout=30).status_code

    with (
        closing(sqlite3.connect(console.store.file, isolation_level=None)) as holder,
        ThreadPoolExecutor(MOST_ASKING + 4) as pool,
    ):
        holder.execute("BEGIN IMMEDIATE")
        labelled = [pool.submit(label, number) for number in range(MOST_ASKING + 4)]
        wait_until(lambda: sum(answer.done() for answer in labelled) == 4)
        assert console.client.get("/console/try", timeout=3).status_code == 200
        holder.execute("ROLLBACK")
    statuses = sorted(answer.result() for answer in labelled)
    assert statuses == [200] * MOST_ASKING + [503] * 4


def test_who_sends_forms_slowly_without_a_session_keeps_nobody_out(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.api.input.limits.LOGIN_S", 1.0)
    console = start()
    console.sign_in("reviewer")
    with ExitStack() as open_connections:
        for path in ("login", "reviews"):
            head = f"POST /console/{path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n"
            for _ in range(MAX_FORMS):
                address = ("127.0.0.1", console.client.base_url.port)
                connection = open_connections.enter_context(socket.create_connection(address))
                form = "content-type: application/x-www-form-urlencoded\r\n\r\nk"
                connection.sendall((head + form).encode())
        wait_until(lambda: console.client.post("/console/login").status_code == 503)
        assert console.post("/console/reviews/undo", "/console", skip="0").status_code == 303
        wait_until(lambda: console.sign_in("reviewer").status_code == 303)


def test_a_label_that_could_not_be_taken_back_can_be_once_more(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.registry.database.LOCKED_S", 0.1)
    console = start()
    console.review_later(1)
    console.sign_in("reviewer")
    (review,) = console.store.queue("ann")
    vote = {name: getattr(review, name) for name in ("request_id", "conversation", "rule")}
    console.post("/console/reviews", "/console", label="allow", skip="0", **vote)
    undo = ("/console/reviews/undo", "/console")
    with closing(sqlite3.connect(console.store.file, isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        assert console.post(*undo, skip="0").status_code == 503
    assert len(console.store.settled(RULE)) == 1
    assert console.post(*undo, skip="0").status_code == 303
    assert console.store.settled(RULE) == []


def test_what_cannot_be_shown_is_said_on_the_page(start: Start) -> None:
    console = start()
    console.sign_in("publisher")
    for turns in (MAX_TURNS, MAX_TURNS + 1):
        said = KeptVerdict(RULE, "0" * 64, "violation", 0.9, 0.5, False)
        messages = [Message("user", "hi")] * turns
        console.store.keep(KeptCheck("request", "", str(turns), messages, (said,)))
    assert console.client.get(f"/console/reviews?skip={10**20}").status_code == 422
    for review in console.store.queue("ann"):
        turns = len(review.messages or ())
        skip = str(MAX_TURNS + 1 - turns)
        fields = {"conversation": review.conversation, "skip": skip}
        answer = console.post("/console/reviews/explain", "/console", **fields)
        assert answer.status_code == (422 if turns > MAX_TURNS else 200)
    console.kept.registry.file.write_bytes(b"no database at all, whatever it was before" * 99)
    page = console.client.get("/console")
    assert page.status_code == 200 and "is damaged" in page.text and RULE in page.text


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
