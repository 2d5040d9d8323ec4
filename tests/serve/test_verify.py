"""Receipts hold, or it is said which one does not: whatever is done to a log, by whichever key, and
however many processes wrote it.
"""

from __future__ import annotations

import fcntl
import gzip
import json
import multiprocessing
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key

from guard.errors import GuardError
from guard.layout import Runs
from guard.weights.card import load_card
from serve.api.app import create_app
from serve.api.observe.audit import AuditLog
from serve.api.observe.receipts import ReceiptKey, chain_end, sealed
from serve.observers import open_observers
from serve.registry.registry import Registry
from serve.verify import BrokenReceipt, Ledger, main
from tests.serve.api.observe.toy_record import record
from tests.serve.cluster.words_engine import WordsEngine, save_words
from tests.serve.serving import serving
from tests.waiting import wait_until

PEM, PRIVATE = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
PUBLIC = serialization.PublicFormat.SubjectPublicKeyInfo
PLAIN = serialization.NoEncryption()
SECRET = "the password is swordfish"


def write_key(path: Path) -> ReceiptKey:
    """A new private key in the file, and its public half beside it."""
    private = Ed25519PrivateKey.generate()
    path.write_bytes(private.private_bytes(PEM, PRIVATE, PLAIN))
    path.with_suffix(".pub").write_bytes(private.public_key().public_bytes(PEM, PUBLIC))
    return ReceiptKey.read(path)


def write_log(path: Path, key: ReceiptKey | None = None) -> list[str]:
    write_checks(path, 4, key)
    return path.read_text().splitlines()


def write_checks(path: Path, checks: int, key: ReceiptKey | None = None) -> None:
    log = AuditLog(path, key)
    for _ in range(checks):
        log.checked(record())
    log.close()


def followed(*paths: Path, key: ReceiptKey | None = None) -> Ledger:
    ledger = Ledger(key)
    for path in paths:
        ledger.read(path)
    return ledger


def third(change: Callable[[str], str]) -> Callable[[list[str]], list[str]]:
    """A log whose third line is changed."""
    return lambda lines: [*lines[:2], change(lines[2]), *lines[3:]]


FAULTS: Mapping[str, Callable[[list[str]], list[str]]] = {
    "log:3: the line was edited": third(lambda line: line.replace("0.75", "0.45")),
    "log:3: not cut off but edited": third(lambda line: line[:50]),
    "log:3: 1 lines before it are missing": lambda lines: [*lines[:2], *lines[3:]],
    "log:3: 2 lines before it are missing": lambda lines: [*lines[:2], *lines[4:]],
    "log:3: 1 lines before": lambda lines: [*lines[:2], lines[3], lines[2], *lines[4:]],  # swapped
    "log:4: it does not follow": lambda lines: [*lines[:3], lines[2], *lines[3:]],  # twice
    "log:3: no receipt": third(lambda line: line.partition(', "hash"')[0] + "}"),
}


@pytest.mark.parametrize("problem", FAULTS)
def test_what_is_done_to_a_log_is_found_and_its_first_line_named(
    tmp_path: Path, problem: str
) -> None:
    log = tmp_path / "log"
    lines = write_log(log)
    assert followed(log).kinds == {"version": 1, "check": 4}
    log.write_text("\n".join(FAULTS[problem](lines)) + "\n")
    with pytest.raises(BrokenReceipt, match=problem):
        followed(log)


def test_a_signature_is_by_the_key_and_of_each_line(tmp_path: Path) -> None:
    key, other = write_key(tmp_path / "key.pem"), write_key(tmp_path / "other.pem")
    log = tmp_path / "log"
    lines = write_log(log, key)
    public = ReceiptKey.read(tmp_path / "key.pub", may_be_public=True)
    assert public.private is None
    followed(log, key=key)
    followed(log, key=public)
    with pytest.raises(BrokenReceipt, match="log:1: the signature is not by this key"):
        followed(log, key=other)
    lines[1] = lines[1].partition(', "signature"')[0] + "}"
    log.write_text("\n".join(lines) + "\n")
    followed(log)  # the chain alone holds
    with pytest.raises(BrokenReceipt, match="log:2: the line has no signature"):
        followed(log, key=key)


def test_another_kind_of_key_is_refused_before_anything_is_opened(tmp_path: Path) -> None:
    write_key(tmp_path / "key.pem")
    rsa = generate_private_key(65537, 2048).private_bytes(PEM, PRIVATE, PLAIN)
    locked = serialization.BestAvailableEncryption(b"secret")
    password = Ed25519PrivateKey.generate().private_bytes(PEM, PRIVATE, locked)
    for name, content, problem in (
        ("rsa", rsa, "Ed25519 private key"),
        ("password", password, "without a password"),
        ("text", b"no key", "not a key in PEM"),
        ("public", (tmp_path / "key.pub").read_bytes(), "Ed25519 private key"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(GuardError, match=problem):
            open_observers(tmp_path / "log", None, tmp_path / name)
    with pytest.raises(GuardError, match="cannot be read"):
        open_observers(tmp_path / "log", None, tmp_path / "nowhere")
    with pytest.raises(GuardError, match="audit log, and there is none"):
        open_observers(None, None, tmp_path / "key.pem")
    assert not (tmp_path / "log").exists()


def write_until(stop: Path, path: Path) -> None:
    while not stop.exists():
        write_checks(path, 20)


def test_processes_share_a_file_that_is_rotated_amid_and_one_chain_goes_through_all(
    tmp_path: Path,
) -> None:
    log, stop = tmp_path / "log", tmp_path / "stop"
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=write_until, args=(stop, log)) for _ in range(2)]
    for writer in writers:
        writer.start()
    rotated: list[Path] = []
    while len(rotated) < 3:
        wait_until(lambda: log.exists() and log.stat().st_size > 50_000)
        rotated.append(log.rename(tmp_path / f"log.{len(rotated)}"))
    stop.touch()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    write_log(log)  # of a process that begins later
    ledger = followed(*rotated, log)
    assert ledger.end is not None and ledger.end.number == ledger.kinds.total()
    assert ledger.kinds["check"] % 20 == 4 and not ledger.cut_off
    last = tmp_path / "log.last"
    log.rename(last)
    write_log(log)
    packed = tmp_path / "log.0.gz"
    packed.write_bytes(gzip.compress(rotated[0].read_bytes()))
    more = followed(packed, *rotated[1:], last, log).kinds["check"] - ledger.kinds["check"]
    assert more == 4


def test_a_new_file_begins_once_the_last_line_of_the_renamed_one_is_written(tmp_path: Path) -> None:
    log, renamed = tmp_path / "log", tmp_path / "log.1"
    write_log(log)
    log.rename(renamed)
    with renamed.open("a+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        end = chain_end(file)
        assert end is not None
        later = threading.Thread(target=write_log, args=(log,))
        later.start()
        wait_until(log.exists)
        time.sleep(0.1)  # it would have written by then
        file.write(sealed({"kind": "check", "time": "now"}, end, None)[0])
        fcntl.flock(file, fcntl.LOCK_UN)
        later.join()
    assert followed(renamed, log).kinds["check"] == 9


def test_what_is_taken_out_under_a_running_server_is_missing_and_a_later_beginning_is_told(
    tmp_path: Path,
) -> None:
    path = tmp_path / "log"
    log = AuditLog(path)
    for _ in range(4):
        log.checked(record())
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3]))
    log.checked(record())
    with pytest.raises(BrokenReceipt, match="log:4: 2 lines before it are missing"):
        followed(path)
    path.write_text("".join(lines[2:]))
    assert "begins at number 3" in followed(path).summary()


def test_a_line_that_was_cut_off_is_named_and_breaks_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    write_log(log)
    with log.open("ab") as file:
        file.write(b'{"kind": "check", "time": "2026')
    assert followed(log).cut_off == [f"{log}:6"]  # at the end
    write_log(log)
    ledger = followed(log)
    assert ledger.cut_off == [f"{log}:6"] and ledger.kinds["check"] == 8
    assert "log:6: cut off" in ledger.summary()


def run(monkeypatch: pytest.MonkeyPatch, arguments: Sequence[object]) -> int:
    monkeypatch.setattr("sys.argv", ["verify", *map(str, arguments)])
    try:
        main()
    except SystemExit as error:
        return int(error.code or 0)
    return 0


def test_nothing_is_no_log_that_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log").touch()
    for named in ("", tmp_path / "log"):
        assert run(monkeypatch, ["--audit", named]) == 2
        assert "there is no receipt" in capsys.readouterr().err


def test_a_conversation_s_receipts_are_found_and_judged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log, key, runs = tmp_path / "log", tmp_path / "key.pem", Runs(tmp_path / "runs")
    folder = save_words(tmp_path / "manners", b"weights")
    messages = [{"role": "user", "content": SECRET}]
    write_key(key)
    observers = open_observers(log, None, key)
    with serving(create_app(WordsEngine({"manners": folder}), observers=observers)) as client:
        assert client.post("/v1/check", json={"messages": messages}).status_code == 200
        client.post("/v1/check", json={"messages": [{"role": "user", "content": "another"}]})
    assert SECRET not in log.read_text()
    version, line, _ = map(json.loads, log.read_text().splitlines())
    card = load_card(folder)
    assert version["version"] == line["rules"][0]["version"] == card.version
    assert version["files"] == card.files and version["temperature"] == card.temperature
    rows = tmp_path / "rows.jsonl"
    unseen = {"messages": [{"role": "user", "content": "never said"}]}
    rows.write_text(json.dumps({"messages": messages}) + "\n" + json.dumps(unseen) + "\n")

    public = ["--audit", log, "--key", key.with_suffix(".pub"), "--runs", runs.root]
    private = ["--audit", log, "--key", key, "--runs", runs.root, "--files", rows]
    assert run(monkeypatch, public) == 0
    assert "signed by this key" in capsys.readouterr().out
    assert run(monkeypatch, [*public, "--files", rows]) == 2  # whose receipt it is, it cannot tell
    assert run(monkeypatch, ["--audit", log]) == 0
    assert "no signature was looked at" in capsys.readouterr().out
    assert run(monkeypatch, private) == 0
    out = capsys.readouterr().out
    assert f"rows.jsonl, row 0: allow by {log}:2" in out and "row 1: no receipt" in out

    assert run(monkeypatch, [*private, "--again"]) == 2
    missing = f"missing (got manners@{card.version[:12]})"
    assert missing in capsys.readouterr().err
    Registry(runs).register(folder, actor="a test", note="")
    engines: list[WordsEngine] = []

    class Started(WordsEngine):
        """As `open_engines` starts, on the folders of its parts."""

        def __enter__(self) -> Started:
            engines.append(self)
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr("serve.verify.open_engines", lambda parts: Started(parts[0].folders))
    assert run(monkeypatch, [*private, "--again"]) == 0
    assert "differs" not in capsys.readouterr().out and len(engines) == 1
    monkeypatch.setattr("tests.serve.cluster.words_engine._strength", lambda card: 2.5)
    assert run(monkeypatch, [*private, "--again"]) == 1
    assert "differs" in capsys.readouterr().out
    log.write_text(log.read_text().replace('"allow"', '"violation"'))
    assert run(monkeypatch, private) == 1
    assert f"broken: {log}:2: the line was edited" in capsys.readouterr().err
