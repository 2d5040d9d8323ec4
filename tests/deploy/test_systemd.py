"""deploy/systemd: the unit starts the server by its own options, and systemd understands it."""

from __future__ import annotations

import configparser
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from serve.api.observe.audit import AuditLog
from tests.deploy.clients import DEPLOY, ROOT, assert_understood, timeout_of
from tests.serve.api.observe.toy_record import record

UNIT = DEPLOY / "systemd" / "centurion.service"
PLACE = "/opt/centurion"


def service() -> configparser.SectionProxy:
    """The section [Service]; no key of it stands there twice."""
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(UNIT.read_text(encoding="utf-8"))
    return unit["Service"]


def test_the_unit_starts_the_server_and_waits_for_its_checks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = shlex.split(service()["ExecStart"])
    assert command[0] == f"{PLACE}/.venv/bin/python"
    options = assert_understood(command, monkeypatch)
    assert options["host"] == "127.0.0.1"
    assert int(service()["TimeoutStopSec"]) >= timeout_of(options)
    assert service()["WorkingDirectory"] == PLACE
    assert options["audit_log"].parent == Path("/var/log", service()["LogsDirectory"])


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="this machine has no systemd")
def test_systemd_has_nothing_to_object(tmp_path: Path) -> None:
    text = UNIT.read_text(encoding="utf-8").replace(PLACE, str(ROOT))
    unit = tmp_path / UNIT.name
    unit.write_text(text.replace("User=centurion", f"User={Path.home().owner()}"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, check=False
    )
    about = [line for line in done.stderr.splitlines() if UNIT.name in line]
    assert done.returncode == 0 and not about, done.stderr


@pytest.mark.skipif(not shutil.which("logrotate"), reason="this machine has no logrotate")
def test_logrotate_takes_the_audit_log_and_a_new_one_begins(tmp_path: Path) -> None:
    audit_log = tmp_path / "audit.jsonl"
    name = f"{Path('/var/log', service()['LogsDirectory'])}/{audit_log.name}"
    text = (UNIT.parent / "centurion.logrotate").read_text(encoding="utf-8")
    assert text.count(name) == 1
    owner, group = tmp_path.owner(), tmp_path.group()
    text = text.replace(name, str(audit_log)).replace("centurion centurion", f"{owner} {group}")
    configuration = tmp_path / "logrotate.conf"
    configuration.write_text(text, encoding="utf-8")
    configuration.chmod(0o644)
    log = AuditLog(audit_log)
    log.checked(record())
    rotate = ["logrotate", "--force", "--state", tmp_path / "state", configuration]
    subprocess.run(rotate, check=True)
    log.checked(record())
    log.close()
    for file in (audit_log, tmp_path / "audit.jsonl.1"):
        assert len(file.read_text(encoding="utf-8").splitlines()) == 2  # and what judged
