"""The server's command: what it serves, and what it refuses before anything is loaded; its options,
TLS, observers, and a Ray of its own.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
from httpx import Client

from guard.errors import GuardError
from guard.home import ROOT
from guard.layout import Runs
from serve.api.app import create_app
from serve.api.input.bounded_heads import BoundedHeads
from serve.observers import open_observers
from serve.policy.rule_set import RuleSet
from serve.registry.reviews import ReviewStore
from serve.selection import Selection, served_parts
from serve.tls import tls_settings
from serve.up import _config, _listening, _rule_sets, _serve, _tenants, main
from tests.serve.server_process import ADMIN, SHOP, ServerProcess, make_certificates
from tests.serve.serving import MESSAGES
from tests.serve.toy_engine import MortalEngine, ToyEngine

Capture = pytest.CaptureFixture[str]


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: Capture, *options: object) -> str:
    monkeypatch.setattr("sys.argv", ["up", *map(str, options)])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    return capsys.readouterr().err


def test_a_port_in_use_is_found_before_the_engine_starts_and_ipv6_is_listened_on() -> None:
    with _listening("127.0.0.1", 0) as taken, pytest.raises(GuardError, match="PORT="):
        _listening("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(GuardError, match="HOST="):
        _listening("no.such.host.invalid", 0)
    with _listening("::1", 0) as listener:
        assert listener.getsockname()[0] == "::1"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("", "make train"),
        ("--method lorra", "Did you mean 'lora'"),
        ("--merged --method alora", "leave out --method"),
        ("--merged --watch", "leave out --watch"),
        ("--replicas 0", "must be a whole number"),
    ],
)
def test_nothing_trained_or_options_that_contradict_each_other_are_refused(
    options: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert said in refusal(monkeypatch, capsys, "--runs", tmp_path, *options.split())


def test_rule_sets_are_read_before_an_engine_starts_and_name_only_served_rules(
    trained_on_both: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    file = trained_on_both / "sets.yaml"
    file.write_text("rule_sets: {support: {rules: [shared, read]}}")
    parts = served_parts(Selection("tiny,minilm", runs=Runs(trained_on_both)))
    assert list(_rule_sets(file, parts)) == ["support"]
    assert _rule_sets(None, parts) == {}
    monkeypatch.setattr("serve.up.start_warm", lambda *_, **__: pytest.fail("it starts"))
    said = refusal(monkeypatch, capsys, "--runs", trained_on_both, "--rule-sets", file)
    assert "support.rules: the rule is not served (got read)" in said


def test_tenants_need_the_rule_sets_that_they_may_ask(tmp_path: Path) -> None:
    rule_sets = {"support": RuleSet.any_of(["shared"])}
    file = tmp_path / "tenants.yaml"
    file.write_text(f"tenants: {{shop: {{keys_sha256: ['{'0' * 64}'], rule_sets: [support]}}}}")
    tenants = _tenants(file, rule_sets)
    assert tenants is not None and [tenant.name for tenant in tenants.all] == ["shop"]
    assert _tenants(None, rule_sets) is None
    with pytest.raises(GuardError, match=r"there are none.*RULESETS="):
        _tenants(file, {})


def test_tls_files_that_are_no_certificate_and_its_key_are_refused(tmp_path: Path) -> None:
    files = make_certificates(tmp_path)
    assert tls_settings(None, None, None) == {}
    assert set(tls_settings(files.client, None, None)) == {"ssl_certfile", "ssl_keyfile"}
    for cert, key, client_ca, error in (
        (None, files.server_key, None, "needs a certificate"),
        (files.server, None, None, "TLS cannot be set up"),
        (files.server, files.client, None, "TLS cannot be set up"),
        (files.server, tmp_path / "gone.pem", None, "TLS cannot be set up"),
        (files.server, files.server_key, files.server_key, "TLS cannot be set up"),
    ):
        with pytest.raises(GuardError, match=error) as raised:
            tls_settings(cert, key, client_ca)
        assert raised.value.remedy


def test_observers_are_those_that_were_asked_for_and_each_process_has_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert open_observers(None, None) == []
    for host, pid in (("one", 7), ("two", 7), ("two", 8)):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        monkeypatch.setattr("os.getpid", lambda pid=pid: pid)
        log = tmp_path / "audit-{hostname}-{pid}.jsonl"
        asked_for = open_observers(log, "http://127.0.0.1:9")
        assert [type(observer).__name__ for observer in asked_for] == ["AuditLog", "Traces"]
        for observer in asked_for:
            observer.close()
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["audit-one-7.jsonl", "audit-two-7.jsonl", "audit-two-8.jsonl"]
    with pytest.raises(GuardError, match="no audit log"):
        open_observers(tmp_path, None)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_one_ray_after_another_starts_and_writes_nothing_into_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a token that stands in no file."""
    import ray

    from serve.cluster.ray_pool import serve_on_ray

    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for _ in range(2):
        with (
            tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as scratch,
            serve_on_ray(1, Path(scratch)),
        ):
            look = ray.remote(lambda: (os.environ["OMP_NUM_THREADS"], os.environ["RAY_AUTH_MODE"]))
            assert ray.get(look.remote()) == (os.environ["OMP_NUM_THREADS"], "token")
        assert not ray.is_initialized()
    assert not (tmp_path / "home" / ".ray").exists()


def test_the_server_ends_once_its_engine_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.engine.thread.engine_thread.PAUSES_S", (0.0,))
    engine = MortalEngine()
    engine.does_start = False
    with _listening("127.0.0.1", 0) as listener, ThreadPoolExecutor(1) as pool:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/check"
        body = {"messages": MESSAGES, "rules": ["kill"]}
        killed = pool.submit(httpx.post, url, json=body, timeout=30, trust_env=False)
        with pytest.raises(GuardError, match="the device is gone"):
            _serve(create_app(engine), listener, 10.0, {})  # type: ignore[arg-type]
        assert killed.result(10).json()["verdict"] == "unjudged"


# A check of an engine whose every step hangs; the process ends once its answer is printed.
HANGING = """
import os, signal, threading, time, httpx
from serve.api.app import create_app
from serve.engine.thread import engine_thread, watchdog
from serve.up import _config, _listening, _serve
from tests.serve.toy_engine import ToyEngine
engine = ToyEngine()
engine.on_step = threading.Event().wait
listener = _listening("127.0.0.1", 0)
url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/check"
body = {"messages": [{"role": "user", "content": "Hello"}], "rules": ["fine"]}
def ask():
    answer = httpx.post(url, json=body, timeout=30, trust_env=False)
    print(answer.json()["verdict"], flush=True)
asking = threading.Thread(target=ask)
asking.start()
leave = os._exit
def leave_once_it_is_printed(status):
    asking.join(10)
    leave(status)
os._exit = leave_once_it_is_printed
def stop():
    while not engine.open:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
SETTING
try:
    _serve(create_app(engine, 1.0), listener, 1.0, dict())
finally:
    print("the engine is closed")
"""

STOPPED_MEANWHILE = "engine_thread.CLOSING_S = 0.5; threading.Thread(target=stop).start()"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ("watchdog.HANGS_FOR_GOOD_S = 0.1", "a batch of the engine hangs"),
        (STOPPED_MEANWHILE, "the engine hangs"),
    ],
)
def test_the_server_ends_with_an_error_although_a_batch_hangs(setting: str, error: str) -> None:
    command = [sys.executable, "-c", HANGING.replace("SETTING", setting)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 2, run.stderr
    assert f"error: {error}" in run.stderr
    assert "unjudged" in run.stdout and "the engine is closed" not in run.stdout


def test_heads_are_bounded_and_connections_kept_for_longer_than_clients_keep_theirs() -> None:
    config: Any = _config(create_app(ToyEngine()), 5.0, {})  # type: ignore[arg-type]
    assert issubclass(config.http, BoundedHeads) and config.timeout_keep_alive > 60


MARKER = "marker-7f3a9c"  # stands in what is checked, and must stand in no record of the server
SUPPORT = {"rule_set": "support", "metadata": {"audience": MARKER}}


@pytest.fixture
def server(tmp_path: Path, uncompiled: None) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path)
    yield server
    server.process.kill()
    server.process.wait()


def long_check(number: int) -> dict[str, Any]:
    """A check that takes the engine a moment, like no other."""
    return {"messages": [{"role": "user", "content": f"{MARKER} {number} " * 100}], **SUPPORT}


def under_way(client: Client) -> int:
    """Checks that the server has taken and not answered, as its metrics say."""
    text = client.get("/metrics", headers=ADMIN).text
    counts = re.findall(r"^guard_checks_(?:waiting|open) (\S+)$", text, re.MULTILINE)
    assert len(counts) == 2
    return sum(int(float(count)) for count in counts)


@pytest.mark.slow
def test_the_server_judges_over_tls_keeps_no_content_and_ends_well(server: ServerProcess) -> None:
    with server.client(has_certificate=False) as stranger, pytest.raises(httpx.TransportError):
        stranger.get("/readyz")
    with server.client() as client, ThreadPoolExecutor(4) as pool:
        assert client.get("/readyz").json() == {"status": "ok"}
        assert "Secure" in client.get("/console/login").headers["set-cookie"]
        assert client.post("/v1/check", json=long_check(0)).status_code == 401
        answer = client.post("/v1/check", json=long_check(0), headers=SHOP).json()
        assert answer["rule_set"] == "support"
        assert answer["verdict"] == answer["results"][0]["verdict"]
        for body in ({"messages": MARKER}, {MARKER: 1}, long_check(0) | {"cache_salt": ""}):
            assert client.post("/v1/check", json=body, headers=SHOP).status_code == 422
        too_long = [{"role": "user", "content": f"{MARKER} " * 9000}]
        unjudged = client.post("/v1/check", json={"messages": too_long}, headers=SHOP).json()
        assert unjudged["verdict"] == "unjudged"
        metrics = client.get("/metrics", headers=ADMIN).text
        assert 'guard_verdicts_total{rule="pii_leak",verdict="unjudged"} 1.0' in metrics
        assert "guard_adapters 1.0" in metrics
        futures = []
        for number in range(1, 5):
            asked = {"json": long_check(number), "headers": SHOP}
            futures.append(pool.submit(client.post, "/v1/check", **asked))
        while sum(future.done() for future in futures) + under_way(client) < len(futures):
            time.sleep(0.001)
        server.process.send_signal(signal.SIGTERM)
        answers = [future.result(60) for future in futures]
    assert [response.json()["rule_set"] for response in answers] == ["support"] * len(futures)
    assert server.process.wait(60) == 0
    written = [json.loads(line) for line in server.audit.read_text().splitlines()]
    lines = [line for line in written if line["kind"] == "check"]
    assert len(lines) == 2 + len(futures)
    assert {(line["tenant"], line["failure"]) for line in lines} == {("shop", None)}
    noted = {line["request_id"] for line in lines}
    assert {response.headers["x-request-id"] for response in answers} <= noted
    assert server.process.stdout is not None
    output = server.output + server.process.stdout.read()
    kept = ReviewStore(Runs(server.kept.parent.parent)).progress()
    assert [(rule.rule, rule.waiting) for rule in kept] == [("pii_leak", 1 + len(futures))]
    encrypted = server.kept.read_bytes().decode(errors="replace")
    texts = (server.audit.read_text(), server.errors.read_text(), output, metrics, encrypted)
    for record in texts:
        assert MARKER not in record
