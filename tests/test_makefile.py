"""The commands: `make` names them, each runs the stage it says, and set-up runs once and only when
something changed.

Set-up itself is tested with a Python that only writes down what it was asked.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.waiting import wait_until

ROOT = Path(__file__).parent.parent
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^([a-z-]+):(?!=).*##", MAKEFILE, re.MULTILINE)
VARIABLES = re.findall(r"^([A-Z_]+) \?=", MAKEFILE, re.MULTILINE)
VARIABLES += ["PYTHON", "JUDGE_BASE_URL", "JUDGE_MODEL", "JUDGE_API_KEY"]
VARIABLES += ["GENERATOR_BASE_URL", "GENERATOR_MODEL", "GENERATOR_API_KEY", "GENERATOR_BUDGET_USD"]
# Taken as built: .venv, Ray in it, and the clients' environment beside it.
DONE = ["-o", ".venv/setup-cpu.stamp", "-o", ".venv/cluster.stamp"]
DONE += ["-o", ".venv-clients/setup.stamp"]

RECORDING_PYTHON = """\
#!/bin/bash
echo "$*" >> "$RECORD"
case "$*" in
  -m\\ venv\\ *) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
esac
case "$*" in
  *$FAILING*) echo "no such thing" && exit 1 ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what set-up reads, with a Python that installs nothing."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "setup", tmp_path / "setup")
    stub = tmp_path / "bin" / "python3.11"
    stub.parent.mkdir()
    stub.write_text(RECORDING_PYTHON)
    stub.chmod(0o755)
    return tmp_path


def make(
    folder: Path, *arguments: str, failing: str = "nothing fails", **environment: str
) -> subprocess.CompletedProcess[str]:
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    extra = {"PATH": path, "RECORD": str(folder / "record"), "FAILING": failing, **environment}
    return run(folder, ["make", *arguments], without(VARIABLES) | extra)


def run(
    folder: Path, command: list[str], environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    nothing = subprocess.DEVNULL
    return subprocess.run(
        command, cwd=folder, env=environment, stdin=nothing, capture_output=True, text=True
    )


def without(names: list[str]) -> dict[str, str]:
    """The environment without these variables and what another make says in it."""
    left_out = {*names, "MAKEFLAGS", "MAKELEVEL", "MFLAGS"}
    return {name: value for name, value in os.environ.items() if name not in left_out}


def set_up(folder: Path, *arguments: str, failing: str = "nothing fails") -> list[str]:
    """What set-up asked for, with the recording Python; it has to end well."""
    done = make(folder, "setup", *arguments, failing=failing)
    assert done.returncode == 0, done.stderr
    return asked(folder)


def asked(folder: Path) -> list[str]:
    """What the recording Python was asked since the last call, except whether it and its pip are
    there.
    """
    record = folder / "record"
    lines = record.read_text().splitlines() if record.exists() else []
    record.unlink(missing_ok=True)
    return [line for line in lines if not line.startswith(("-c ", "-m pip --version"))]


def commands(*arguments: str, **environment: str) -> list[str]:
    """What make would run, with set-up taken as done."""
    done = make(ROOT, "-n", *DONE, *arguments, **{"DEVICE": "cpu", **environment})
    assert done.returncode == 0, done.stderr
    lines = done.stdout.replace("\\\n", " ").splitlines()
    return [" ".join(line.split()) for line in lines if not line.startswith("echo ")]


def test_make_lists_every_target_and_variable() -> None:
    phony = re.search(r"^\.PHONY: help help-all (.*)$", MAKEFILE, re.MULTILINE)
    assert phony and phony[1].split() == COMMANDS
    targets = re.findall(r"^([a-z-]+):(?!=)", MAKEFILE, re.MULTILINE)
    assert set(targets) == {"help", "help-all", *COMMANDS}
    short, text = make(ROOT).stdout, make(ROOT, "help-all").stdout
    assert text.startswith(short) and "make help-all" in short
    assert re.findall(r"^  make ([\w-]+) +\S", text, re.MULTILINE) == COMMANDS
    assert len(re.findall(r"^  (?:make|[A-Z]+=)", short, re.MULTILINE)) < 25
    assert [name for name in VARIABLES if not re.search(rf"\b{name}\b", text)] == []
    used = set(re.findall(r"\$\$?\(?([A-Z_]{2,}|[AB])\b", MAKEFILE))
    assert used <= set(VARIABLES)


def test_the_servers_threads_spin_briefly_unless_the_shell_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert spin_count_of("up") == "10000"
    assert spin_count_of("up", GOMP_SPINCOUNT="7") == "7"
    assert spin_count_of("up", OMP_WAIT_POLICY="PASSIVE") == ""
    assert spin_count_of("train") == spin_count_of("serve") == ""


def spin_count_of(target: str, **environment: str) -> str:
    """For how long make lets a target's threads spin; empty where it leaves that alone."""
    stamp, python = ".venv/setup-cpu.stamp", "python=echo spins $${GOMP_SPINCOUNT-},"
    done = make(ROOT, "-s", "-o", stamp, target, python, **{"DEVICE": "cpu", **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout.removeprefix("spins ").partition(",")[0]


TINY = "--model 'tiny'"
CURVE = "--rule 'toxicity' --data \"$DATA\""
SCAN = 'serve.scan.run --files "$FILES" --model tiny'
# What is asked of make -> the modules that it runs, with their arguments.
STAGES = {
    "all RULE=pii_leak SEEDS=0,1": [
        "data.build --rule 'pii_leak'",
        "train.run --rule 'pii_leak' --model tiny --seeds '0,1'",
        "eval.run --rule 'pii_leak' --model tiny --seeds '0,1'",
        f"serve.bench latency {TINY} --quick",
    ],
    "curve RULE=toxicity DATA=mine.csv ROWS=0,20 SEEDS=0 METHOD=head FORCE=1 'OPTIONS=--test 9'": [
        f"data.study {CURVE} --rows '0,20' --seeds '0' --test 9",
        f"train.study {CURVE} --model tiny --method 'head' --force",
        f"eval.study {CURVE} --model tiny --method 'head'",
    ],
    "serve QUICK=0": [f"serve.bench latency {TINY}"],
    "bench": ["serve.bench"],
    "bench NAME=latency 'OPTIONS=--repeats 1'": [f"serve.bench 'latency' {TINY} --repeats 1"],
    "gpu-check FORCE=1": ["serve.bench gpu_check --model qwen3-4b --force"],
    "gpu-check DRY=1": ["serve.bench gpu_check --model tiny --dry"],
    "up RULE=all": ["serve.up --model tiny"],
    "up RULE=a,b MERGED=1 REPLICAS=2 HOST=0.0.0.0": [
        "serve.up --model tiny --rules 'a,b' --merged --replicas '2' --host '0.0.0.0'"
    ],
    "up RULESETS=s.yaml TENANTS=t.yaml AUDIT=a AUDITKEY=k TRACES=http://c:1 TLSCERT=c "
    "TLSKEY=k TLSCA=a REVIEWS=p.yaml POLICIES=5": [
        "serve.up --model tiny --rule-sets 's.yaml' --tenants 't.yaml' --policies '5' "
        "--audit-log 'a' --audit-key 'k' --traces 'http://c:1' --reviews 'p.yaml' --tls-cert 'c' "
        "--tls-key 'k' --tls-client-ca 'a'"
    ],
    "verify 'AUDIT=a b' KEY=k FILES=c AGAIN=1": [
        "serve.verify --audit 'a b' --key 'k' --files \"$FILES\" --again"
    ],
    "scan FILES=a OUT=there": [f'{SCAN} --out "$OUT"'],
    "replay A=a B=b FILES=c FORCE=1": ['serve.scan.replay "$A" "$B" --files "$FILES" --force'],
    "data RULE=a 'DATA=generator+my rows.jsonl+reviews'": [
        "serve.reviews --export 'a'",
        "data.build --rule 'a' --data \"$DATA\"",
    ],
    "data RULE=a DATA=generator": ["data.build --rule 'a' --data \"$DATA\""],
    "rules": ["serve.versions list"],
    "rules RULE=a,b OPTIONS=--files": ["serve.versions list --rules 'a,b' --files"],
    "publish RULE=a MODEL=big WHY=better FORCE=1": [
        "serve.versions publish --rule 'a' --model big --why \"$WHY\" --force"
    ],
    "rollback RULE=a METHOD=head VERSION=3f2a WHY=worse": [
        "serve.versions rollback --rule 'a' --model tiny --method 'head' --version '3f2a' "
        '--why "$WHY"'
    ],
    "test QUICK=1 'TESTS=tests/guard -x'": ["pytest -m 'not slow' tests/guard -x"],
}


@pytest.mark.parametrize("asked", STAGES)
def test_variables_reach_the_stages_from_the_command_line(asked: str) -> None:
    lines = [line.partition(".venv/bin/python -m ")[2] for line in commands(*shlex.split(asked))]
    assert lines == STAGES[asked]


def test_variables_reach_the_stages_from_the_shell_but_not_its_own_names() -> None:
    assert commands("up", RULE="a,b") == commands("up", "RULE=a,b")
    named = commands("up", "PORT=9000", HOST="machine")
    assert named == [".venv/bin/python -m serve.up --model tiny --port '9000'"]
    assert commands("bench", NAME="machine") == commands("bench")


VALUES = [("data", "RULE", "a, b"), ("curve", "DATA", "it's $rows.jsonl")]
VALUES += [("scan", "FILES", "logs/a$b.jsonl"), ("scan", "FILES", "*.jsonl.gz b.jsonl")]


@pytest.mark.parametrize(("target", "variable", "value"), VALUES)
def test_a_value_is_one_word(checkout: Path, target: str, variable: str, value: str) -> None:
    (checkout / "one.jsonl.gz").touch()
    (checkout / "two.jsonl.gz").touch()
    for python in (checkout / "bin" / "python3.11", checkout / ".venv" / "bin" / "python"):
        python.parent.mkdir(parents=True, exist_ok=True)
        python.write_text('#!/bin/bash\nprintf "<%s>" "$@"\n')
        python.chmod(0o755)
    done_already = ("-o", ".venv/setup-cpu.stamp", "DEVICE=cpu")
    done = make(checkout, *done_already, target, f"{variable}={value}")
    assert f"<{value}>" in done.stdout, done.stderr


def test_every_command_sets_up_first_and_runs_what_exists(checkout: Path) -> None:
    for target in (name for name in COMMANDS if name != "clean"):
        lines = planned(checkout, target)
        assert lines[0] == "bash setup/install.sh cpu", target
        for module in re.findall(r"-m ([a-z]+(?:\.[a-z_]+)+)", "\n".join(lines)):
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module


def rewrite(path: Path, text: str) -> None:
    """Write a file so that make sees it is newer than the last stamp, within a tick of the clock
    too.
    """
    path.write_text(text)
    later = time.time() + 1
    os.utime(path, (later, later))


def pin_another(pins: Path) -> None:
    rewrite(pins, pins.read_text() + "another==1.0\n")


def test_setup_runs_once_and_again_for_a_pin_or_the_plugin_not_for_a_lint_rule(
    checkout: Path,
) -> None:
    steps = set_up(checkout, "DEVICE=cpu")
    assert steps[0] == "-m venv .venv"
    assert [step.split("--no-deps ")[-1] for step in steps[1:]] == [
        "--retries 1 torch==2.13.0+cpu",
        "-r setup/cpu.txt",
        "-m compileall -qq -j 0 .venv/lib",
        "--no-build-isolation --editable .",
    ]
    pyproject = checkout / "pyproject.toml"
    rewrite(pyproject, pyproject.read_text().replace("line-length = 100", "line-length = 90"))
    assert set_up(checkout, "DEVICE=cpu") == []
    rewrite(pyproject, pyproject.read_text().replace('version = "', 'version = "9.'))
    assert len(set_up(checkout, "DEVICE=cpu")) == 4
    pin_another(checkout / "setup" / "common.txt")
    assert len(set_up(checkout, "DEVICE=cpu")) == 4


def test_without_a_configured_wheel_torch_comes_by_way_of_uv(checkout: Path) -> None:
    steps = set_up(checkout, "DEVICE=cpu", failing="torch==2.13.0+cpu")
    uv, torch = (step for step in steps if " uv" in step)
    assert uv.split("--no-deps ")[1].startswith("uv==")
    into = "-m uv pip install --python .venv/bin/python --no-deps"
    assert torch == f"{into} --torch-backend cpu torch==2.13.0"


def test_what_fails_is_named_and_tried_again(checkout: Path) -> None:
    assert "unknown device 'tpu'" in make(checkout, "setup", "DEVICE=tpu").stderr
    done = make(checkout, "setup", "DEVICE=cpu", PYTHON="false")
    assert "no Python 3.11 or 3.12 among: false" in done.stderr
    assert not (checkout / ".venv").exists()
    for failing, message in (
        ("torch==2.13.0", "torch 2.13.0 for CPU could not be installed"),
        ("-r setup/cpu.txt", "setup/cpu.txt could not be installed"),
        ("--editable", "plugin could not be installed"),
    ):
        done = make(checkout, "setup", "DEVICE=cpu", failing=failing)
        assert done.returncode != 0
        assert message in done.stderr and "no such thing" in done.stderr
    asked(checkout)
    assert "-m venv .venv" not in set_up(checkout, "DEVICE=cpu")
    rewrite(checkout / "setup" / "common.txt", "")
    assert set_up(checkout, "DEVICE=cpu", failing="-m pip --version")[0] == "-m venv .venv"


def test_another_device_gets_a_new_environment_and_is_remembered(checkout: Path) -> None:
    """After an install that was interrupted too."""
    assert make(checkout, "setup", "DEVICE=cuda", failing="--editable").returncode != 0
    asked(checkout)
    for device in ("cpu", "cuda"):
        assert "building it anew" in make(checkout, "setup", f"DEVICE={device}").stderr
        steps = asked(checkout)
        assert steps[0] == "-m venv .venv"
        assert any(step.endswith(f"-r setup/{device}.txt") for step in steps)
    assert set_up(checkout) == []


def test_the_clients_environment_is_not_for_quick_tests(checkout: Path) -> None:
    assert not any("clients" in step for step in planned(checkout, "test", "QUICK=1"))
    set_up(checkout, "DEVICE=cpu")
    assert make(checkout, "test", "DEVICE=cpu").returncode == 0
    steps = asked(checkout)
    assert steps[0] == "-m venv .venv-clients"
    assert steps[1].endswith("--no-deps -r setup/clients.txt")
    assert steps[2].endswith("--no-deps -r setup/cluster.txt")
    assert steps[3].startswith("-m pytest")


@pytest.mark.parametrize(
    ("command", "pins"), [("test", "setup/clients.txt"), ("up REPLICAS=2", "setup/cluster.txt")]
)
def test_what_a_command_needs_besides_is_installed_once_and_again_for_another_pin(
    checkout: Path, command: str, pins: str
) -> None:
    words = [*command.split(), "DEVICE=cpu"]
    set_up(checkout, "DEVICE=cpu")
    done = make(checkout, *words, failing=f"-r {pins}")
    assert done.returncode != 0 and f"{pins} could not be installed" in done.stderr
    installs = []
    for changed in ("", "", "setup/common.txt", pins):
        if changed:
            pin_another(checkout / changed)
        asked(checkout)
        assert make(checkout, *words).returncode == 0
        steps = asked(checkout)
        installs.append(any(step.endswith(f"--no-deps -r {pins}") for step in steps))
    assert installs == [True, False, False, True]


def planned(checkout: Path, *arguments: str) -> list[str]:
    """What make would run first."""
    return make(checkout, "-n", *arguments, "DEVICE=cpu").stdout.splitlines()


def test_a_pin_names_a_version_and_no_address() -> None:
    marker = r"( ; python_version > \"3\.11\"| ; platform_machine == \"x86_64\")?"
    for path in sorted((ROOT / "setup").glob("*.txt")):
        for line in path.read_text().splitlines():
            pin = rf"#.*||-r common\.txt|[\w.-]+==[\w.]+{marker}"
            assert re.fullmatch(pin, line), line
    # What breaks the CPU environment.
    pins = (ROOT / "setup" / "common.txt").read_text() + (ROOT / "setup" / "cpu.txt").read_text()
    assert not re.search(r"^(torchvision|torchaudio|torchcodec|nvidia-)", pins, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "status", "printed"),
    [
        ("echo 3 passed in 1s", 0, "3 passed in 1s"),
        ("echo 1 failed in 1s; exit 1", 2, "1 failed in 1s"),
        ("(sleep 60 & echo $$! > server); echo 3 passed in 1s", 1, "sleep"),
    ],
)
def test_ci_ends_with_pytests_words_and_fails_for_a_process_left_behind(
    tmp_path: Path, recipe: str, status: int, printed: str
) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    (tmp_path / "Makefile").write_text(f"check:\n\t@echo checked\ntest:\n\t@{recipe}\n")
    done = run(tmp_path, ["bash", ".ci/run"], without([]))
    lines = done.stdout.splitlines()
    assert done.returncode == status
    assert lines[0] == "checked" and lines[-1].endswith(printed)
    if (tmp_path / "server").exists():
        state = Path(f"/proc/{(tmp_path / 'server').read_text().strip()}/stat")
        wait_until(lambda: not state.exists() or " Z " in state.read_text(), seconds=10)
