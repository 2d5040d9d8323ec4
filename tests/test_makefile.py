"""The commands: `make` names them, each runs the stage it says, and set-up runs once and only when
something changed.

Set-up itself is tested with a Python that only writes down what it was asked.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EVERY_DAY = ["all", "rule", "data", "train", "eval", "serve", "up", "scan", "plan", "test"]
FOR_EXPERTS = [
    "calibrate",
    "test-gpu-path",
    "compare",
    "replay",
    "lengths",
    "transfer",
    "curve",
    "sweep",
    "bench",
    "race",
    "merge",
    "fuzz",
    "doctor",
]
FOR_EXPERTS += ["setup", "check", "format", "clean"]
COMMANDS = EVERY_DAY + FOR_EXPERTS
VARIABLES = [
    "CENTURION_HOME",
    "MAX_FPR",
    "THRESHOLD",
    "RULE",
    "MODEL",
    "DATA",
    "SPLITS",
    "SEEDS",
    "QUICK",
    "FORCE",
    "REAL",
    "ROWS",
    "GRID",
    "WIDE",
    "HOST",
    "PORT",
    "TIMEOUT",
    "RULESETS",
    "TENANTS",
    "AUDIT",
    "TRACES",
    "TLSCERT",
    "TLSKEY",
    "TLSCA",
    "METHOD",
    "MERGED",
    "PLAN",
    "TRACE",
    "REPLICAS",
    "OPTIONS",
    "MINUTES",
    "TESTS",
    "DEVICE",
    "PYTHON",
]
VARIABLES += [
    "NAME",
    "POLICY",
    "JUDGED",
    "UNLABELLED",
    "EXAMPLES",
    "A",
    "B",
    "FILES",
    "OUT",
    "FORMAT",
    "CLUSTER",
    "ACTORS",
    "JUDGE_BASE_URL",
    "JUDGE_MODEL",
    "JUDGE_API_KEY",
]
VARIABLES += ["GENERATOR_BASE_URL", "GENERATOR_MODEL", "GENERATOR_API_KEY", "GENERATOR_BUDGET_USD"]
NEED_NO_SETUP = {"clean"}
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
    clean = {
        key: value
        for key, value in os.environ.items()
        if key not in {*VARIABLES, "MAKEFLAGS", "MAKELEVEL", "MFLAGS"}
    }
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    extra = {"PATH": path, "RECORD": str(folder / "record"), "FAILING": failing, **environment}
    return subprocess.run(
        ["make", *arguments],
        cwd=folder,
        env=clean | extra,
        capture_output=True,
        text=True,
        check=False,
    )


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


def test_make_lists_what_is_for_every_day_and_help_all_everything() -> None:
    short, text = make(ROOT).stdout, make(ROOT, "help-all").stdout
    assert text.startswith(short) and "make help-all" in short
    assert re.findall(r"^  make ([\w-]+) +\S", short, re.MULTILINE) == EVERY_DAY
    assert len(re.findall(r"^  [A-Z]+=", short, re.MULTILINE)) < 15
    every_day, _, for_experts = text.partition("For experts:")
    assert re.findall(r"^  make ([\w-]+) +\S", every_day, re.MULTILINE) == EVERY_DAY
    assert re.findall(r"^  make ([\w-]+) +\S", for_experts, re.MULTILINE) == FOR_EXPERTS
    assert [name for name in VARIABLES if not re.search(rf"\b{name}\b", text)] == []


def test_every_target_is_listed_and_phony() -> None:
    text = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert phony and phony[1].split() == ["help", "help-all", *COMMANDS]
    assert set(re.findall(r"^([a-z-]+):(?!=)", text, re.MULTILINE)) == {
        "help",
        "help-all",
        *COMMANDS,
    }


def test_all_goes_from_data_to_the_quick_benchmark_for_one_rule() -> None:
    python = ".venv/bin/python -m"
    assert commands("all", "RULE=pii_leak", "SEEDS=0,1") == [
        f"{python} data.build --rule 'pii_leak'",
        f"{python} train.run --rule 'pii_leak' --model tiny --seeds '0,1'",
        f"{python} eval.run --rule 'pii_leak' --model tiny --seeds '0,1'",
        f"{python} serve.bench latency --offer=model='tiny' --offer=rule='pii_leak' --offer=quick",
    ]


def test_a_study_is_drawn_trained_and_reported_from_the_same_rows() -> None:
    python = ".venv/bin/python -m"
    named = "transfer --rule 'toxicity' --data \"$DATA\""
    arguments = ["RULE=toxicity", "DATA=mine.csv", "REAL=0,20", "SEEDS=0", "FORCE=1"]
    assert commands("transfer", *arguments) == [
        f"{python} data.study {named} --rows '0,20' --seeds '0'",
        f"{python} train.study {named} --model tiny --force",
        f"{python} eval.study.run {named} --model tiny",
    ]
    assert commands("curve", "ROWS=100,all", "MODEL=big", "METHOD=head", "OPTIONS=--test 500") == [
        f"{python} data.study curve --rule 'medical_advice' --rows '100,all' --test 500",
        f"{python} train.study curve --rule 'medical_advice' --model big --method 'head'",
        f"{python} eval.study.run curve --rule 'medical_advice' --model big --method 'head'",
    ]


def test_the_servers_threads_spin_briefly_unless_the_shell_says_how_they_wait(
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


def test_variables_reach_the_stages_from_the_command_line_and_the_shell() -> None:
    bench = ".venv/bin/python -m serve.bench"
    offers = "--offer=model='tiny' --offer=rule='medical_advice'"
    assert commands("serve") == [f"{bench} latency {offers}"]
    assert commands("serve", "QUICK=1", "MODEL=big") == [
        f"{bench} latency --offer=model='big' --offer=rule='medical_advice' --offer=quick"
    ]
    assert commands("race") == [f"{bench} race {offers}"]
    for name in ("load", "merged"):
        assert commands("bench", f"NAME={name}") == [f"{bench} '{name}' {offers}"]
    assert commands("bench", "NAME=latency", "WIDE=1", "FORCE=1") == [
        f"{bench} 'latency' {offers} --offer=wide --offer=force"
    ]
    assert commands("bench", "NAME=load", "OPTIONS=--repeats 1") == [
        f"{bench} 'load' {offers} --repeats 1"
    ]
    assert commands("bench") == commands("bench", NAME="machine") == [bench]
    assert commands("data", RULE="all") == [".venv/bin/python -m data.build --rule 'all'"]
    assert commands("data", "DATA=own.csv", "SPLITS=new")[0].endswith(
        "--rule 'medical_advice' --data \"$DATA\" --splits 'new'"
    )
    assert (
        commands("up")
        == commands("up", "RULE=all")
        == [".venv/bin/python -m serve.up --model tiny"]
    )
    assert (
        commands("up", RULE="a,b")
        == commands("up", "RULE=a,b")
        == [".venv/bin/python -m serve.up --model tiny --rules 'a,b'"]
    )
    assert commands("up", "RULE=a", "MERGED=1") == [
        ".venv/bin/python -m serve.up --model tiny --rules 'a' --merged"
    ]
    assert commands("up", "REPLICAS=1-4") == [
        ".venv/bin/python -m serve.up --model tiny --replicas '1-4'"
    ]
    assert commands("up", "REPLICAS=1-4", "SCALEDOWN=60")[0].endswith("--scale-down '60'")
    assert commands("up", "PORT=9000", HOST="machine") == [
        ".venv/bin/python -m serve.up --model tiny --port '9000'"
    ]
    assert commands("up", "HOST=0.0.0.0") == [
        ".venv/bin/python -m serve.up --model tiny --host '0.0.0.0'"
    ]
    assert commands("up", "RULESETS=sets.yaml", "TENANTS=tenants.yaml") == [
        ".venv/bin/python -m serve.up --model tiny --rule-sets 'sets.yaml' --tenants 'tenants.yaml'"
    ]
    observed = commands("up", "AUDIT=a.jsonl", "TRACES=http://c:4318")
    assert observed[0].endswith("--audit-log 'a.jsonl' --traces 'http://c:4318'")
    encrypted = commands("up", "TLSCERT=c.pem", "TLSKEY=k.pem", "TLSCA=a.pem")
    assert encrypted[0].endswith("--tls-cert 'c.pem' --tls-key 'k.pem' --tls-client-ca 'a.pem'")
    scan = '.venv/bin/python -m serve.scan.run --files "$FILES" --model tiny'
    assert commands("scan", "FILES=a b") == [scan]
    on_cluster = commands("scan", "FILES=a", "CLUSTER=1", "ACTORS=2", "OUT=there")
    assert on_cluster[-1] == f"{scan} --out \"$OUT\" --cluster --actors '2'"
    replay = '.venv/bin/python -m serve.scan.replay "$A" "$B" --files "$FILES"'
    assert commands("replay", "A=a", "B=b", "FILES=c", "METHOD=lora", "FORCE=1") == [
        f"{replay} --method 'lora' --force"
    ]
    assert commands("train", "FORCE=1")[0].endswith("--model tiny --force")
    assert commands("train", "FORCE=0") == commands("train")
    assert commands("serve", "QUICK=0", "WIDE=0") == commands("serve")
    assert commands("test", "QUICK=0") == commands("test")
    assert commands("scan", "FILES=a", "CLUSTER=0") == commands("scan", "FILES=a")
    assert commands("train", "METHOD=head")[0].endswith("--model tiny --method 'head'")
    fuzz = ".venv/bin/python -m tests.serve.fuzz.run"
    assert commands("fuzz", "MINUTES=3") == [f"{fuzz} --minutes '3'"]
    assert commands("test", "QUICK=1")[0].endswith("pytest -m 'not slow'")
    assert commands("test", "TESTS=tests/guard -x")[0].endswith("pytest tests/guard -x")


@pytest.mark.parametrize(
    ("target", "variable", "value"),
    [
        ("data", "RULE", "a, b"),
        ("data", "DATA", "my data.csv"),
        ("data", "DATA", "it's rows.jsonl"),
        ("compare", "DATA", "it's $rows.jsonl"),
        ("scan", "FILES", "logs/a$b.jsonl"),
        ("train", "SEEDS", "0, 1"),
        ("scan", "FILES", "*.jsonl.gz hub:a/b"),
    ],
)
def test_a_value_reaches_its_stage_as_one_word(
    checkout: Path, target: str, variable: str, value: str
) -> None:
    (checkout / "one.jsonl.gz").touch()
    (checkout / "two.jsonl.gz").touch()
    for python in (checkout / "bin" / "python3.11", checkout / ".venv" / "bin" / "python"):
        python.parent.mkdir(parents=True, exist_ok=True)
        python.write_text('#!/bin/bash\nprintf "<%s>" "$@"\n')
        python.chmod(0o755)
    done = make(
        checkout, "-o", ".venv/setup-cpu.stamp", target, "DEVICE=cpu", f"{variable}={value}"
    )
    assert f"<{value}>" in done.stdout, done.stderr


@pytest.mark.parametrize("target", [name for name in COMMANDS if name not in NEED_NO_SETUP])
def test_every_command_sets_up_first(checkout: Path, target: str) -> None:
    assert planned(checkout, target)[0] == "bash setup/install.sh cpu"


@pytest.mark.parametrize("target", [name for name in COMMANDS if name not in NEED_NO_SETUP])
def test_every_module_a_command_runs_exists(target: str) -> None:
    for module in re.findall(r"-m ([a-z]+(?:\.[a-z_]+)+)", "\n".join(commands(target))):
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


def test_setup_installs_torch_then_the_pinned_packages_then_the_plugin_and_nothing_twice(
    checkout: Path,
) -> None:
    done = make(checkout, "setup", "DEVICE=cpu")
    assert done.returncode == 0, done.stderr
    steps = asked(checkout)
    assert steps[0] == "-m venv .venv"
    assert [step.split("--no-deps ")[-1] for step in steps[1:]] == [
        "--retries 1 torch==2.13.0+cpu",
        "-r setup/cpu.txt",
        "-m compileall -qq -j 0 .venv/lib",
        "--no-build-isolation --editable .",
    ]
    assert make(checkout, "setup", "DEVICE=cpu").returncode == 0
    assert asked(checkout) == []


def test_setup_runs_again_when_a_pin_or_the_plugin_changed_but_not_for_a_lint_rule(
    checkout: Path,
) -> None:
    make(checkout, "setup", "DEVICE=cpu")
    asked(checkout)
    pyproject = checkout / "pyproject.toml"
    rewrite(pyproject, pyproject.read_text().replace("line-length = 100", "line-length = 90"))
    make(checkout, "setup", "DEVICE=cpu")
    assert asked(checkout) == []
    rewrite(pyproject, pyproject.read_text().replace('version = "', 'version = "9.'))
    make(checkout, "setup", "DEVICE=cpu")
    assert len(asked(checkout)) == 4
    pin_another(checkout / "setup" / "common.txt")
    make(checkout, "setup", "DEVICE=cpu")
    assert len(asked(checkout)) == 4


def test_without_a_configured_wheel_torch_comes_by_way_of_uv(checkout: Path) -> None:
    done = make(checkout, "setup", "DEVICE=cpu", failing="torch==2.13.0+cpu")
    assert done.returncode == 0, done.stderr
    by_uv = [step for step in asked(checkout) if " uv" in step]
    assert by_uv[0].split("--no-deps ")[1].startswith("uv==")
    assert (
        by_uv[1]
        == "-m uv pip install --python .venv/bin/python --no-deps --torch-backend cpu torch==2.13.0"
    )


@pytest.mark.parametrize(
    ("failing", "message"),
    [
        ("torch==2.13.0", "torch 2.13.0 for CPU could not"),
        ("-r setup/cpu.txt", "setup/cpu.txt could not"),
        ("--editable", "plugin could not"),
    ],
)
def test_a_failed_step_is_named_with_pips_words_and_is_tried_again(
    checkout: Path, failing: str, message: str
) -> None:
    done = make(checkout, "setup", "DEVICE=cpu", failing=failing)
    assert done.returncode != 0
    assert f"{message} be installed" in done.stderr
    assert "no such thing" in done.stderr
    asked(checkout)
    assert make(checkout, "setup", "DEVICE=cpu").returncode == 0
    assert "-m venv .venv" not in asked(checkout)


def test_an_environment_without_pip_is_built_anew(checkout: Path) -> None:
    done = make(checkout, "setup", "DEVICE=cpu", failing="-m venv")
    assert "cannot build a virtual environment" in done.stderr
    assert (checkout / ".venv/bin/python").exists()
    asked(checkout)
    done = make(checkout, "setup", "DEVICE=cpu", failing="-m pip --version")
    assert done.returncode == 0, done.stderr
    assert asked(checkout)[0] == "-m venv .venv"


def test_another_device_gets_a_new_environment(checkout: Path) -> None:
    make(checkout, "setup", "DEVICE=cpu")
    asked(checkout)
    assert "building it anew" in make(checkout, "setup", "DEVICE=cuda").stderr
    steps = asked(checkout)
    assert steps[0] == "-m venv .venv"
    assert steps[1].endswith("-r setup/cuda.txt")


def test_the_device_is_remembered_whatever_nvidia_smi_says_later(checkout: Path) -> None:
    make(checkout, "setup", "DEVICE=cuda")
    asked(checkout)
    assert make(checkout, "setup").returncode == 0
    assert asked(checkout) == []


def test_an_interrupted_install_is_not_topped_up_for_another_device(checkout: Path) -> None:
    assert make(checkout, "setup", "DEVICE=cuda", failing="--editable").returncode != 0
    asked(checkout)
    assert "building it anew" in make(checkout, "setup", "DEVICE=cpu").stderr
    assert asked(checkout)[0] == "-m venv .venv"


def test_the_clients_environment_is_built_once_for_all_tests_and_never_for_the_quick_ones(
    checkout: Path,
) -> None:
    assert not any("clients" in step for step in planned(checkout, "test", "QUICK=1"))
    make(checkout, "setup", "DEVICE=cpu")
    asked(checkout)
    assert make(checkout, "test", "DEVICE=cpu").returncode == 0
    steps = asked(checkout)
    assert steps[0] == "-m venv .venv-clients"
    assert steps[1].endswith("--no-deps -r setup/clients.txt")
    assert steps[2].endswith("--no-deps -r setup/cluster.txt")
    assert steps[3].startswith("-m pytest")
    make(checkout, "test", "DEVICE=cpu")
    assert asked(checkout) == ["-m pytest"]
    pin_another(checkout / "setup" / "clients.txt")
    failing = "-r setup/clients.txt"
    done = make(checkout, "test", "DEVICE=cpu", failing=failing)
    assert done.returncode != 0 and "setup/clients.txt could not be installed" in done.stderr
    assert "no such thing" in done.stderr
    asked(checkout)
    assert make(checkout, "test", "DEVICE=cpu").returncode == 0
    assert len(asked(checkout)) == 3


def test_ray_is_installed_once_for_what_needs_it_and_another_setup_leaves_it(
    checkout: Path,
) -> None:
    install = "-m pip install --disable-pip-version-check --no-input --no-deps -r setup/cluster.txt"
    make(checkout, "up", "DEVICE=cpu")
    assert install not in asked(checkout)
    done = make(checkout, "up", "REPLICAS=2", "DEVICE=cpu", failing=install)
    assert "setup/cluster.txt could not be installed" in done.stderr
    asked(checkout)
    for _ in range(2):
        make(checkout, "up", "REPLICAS=2", "DEVICE=cpu")
    up = "-m serve.up --model tiny --replicas 2"
    assert asked(checkout) == [install, up, up]
    pin_another(checkout / "setup" / "common.txt")
    make(checkout, "up", "REPLICAS=2", "DEVICE=cpu")
    assert (checkout / ".venv" / "cluster.stamp").exists()
    assert install not in asked(checkout)
    pin_another(checkout / "setup" / "cluster.txt")
    make(checkout, "up", "REPLICAS=2", "DEVICE=cpu")
    assert install in asked(checkout)


def planned(checkout: Path, *arguments: str) -> list[str]:
    """What make would run first."""
    return make(checkout, "-n", *arguments, "DEVICE=cpu").stdout.splitlines()


def test_an_unknown_device_and_an_unsuitable_python_are_refused_before_anything_is_built(
    checkout: Path,
) -> None:
    assert "unknown device 'tpu'" in make(checkout, "setup", "DEVICE=tpu").stderr
    done = make(checkout, "setup", "DEVICE=cpu", PYTHON="false")
    assert "no Python 3.11 or 3.12 among: false" in done.stderr
    assert not (checkout / ".venv").exists()


def test_a_pin_names_a_version_and_no_address() -> None:
    for path in sorted((ROOT / "setup").glob("*.txt")):
        for line in path.read_text().splitlines():
            assert re.fullmatch(
                r"#.*||-r common\.txt|[\w.-]+==[\w.]+"
                r"( ; python_version > \"3\.11\"| ; platform_machine == \"x86_64\")?",
                line,
            ), line


def test_what_breaks_the_cpu_environment_is_not_in_it() -> None:
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
    clean = {
        key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))
    }
    done = subprocess.run(
        ["bash", ".ci/run"],
        cwd=tmp_path,
        env=clean,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status
    assert done.stdout.splitlines()[0] == "checked"
    assert done.stdout.splitlines()[-1].endswith(printed)
    if (tmp_path / "server").exists():
        state = Path(f"/proc/{(tmp_path / 'server').read_text().strip()}/stat")
        for _ in range(100):
            if not state.exists() or " Z " in state.read_text():
                return
            time.sleep(0.1)
        pytest.fail("the process left behind is still running")
