#!/usr/bin/env bash
# Builds or updates .venv: `bash setup/install.sh cpu|cuda`, run by `make setup`. PYTHON=… is the interpreter for a new .venv.
# Returns at once when nothing it depends on changed. The log is .venv/setup.log.
set -euo pipefail
trap 'exit 130' INT # compileall takes a Ctrl+C for a failure
cd "$(dirname "$0")/.."

TORCH=2.13.0
UV=0.13.8
device=${1:-}
log=.venv/setup.log

fail() { # what went wrong, what to do about it
    echo "setup: $1" >&2
    [ ! -f "$log" ] || tail -n 8 "$log" | sed 's/^/  | /' >&2
    echo "setup: $2" >&2
    exit 1
}

supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3}; do
        # Asked, not only looked up: a version manager's shim may be on PATH for a version that is not there.
        if supported "$candidate"; then command -v "$candidate" && return; fi
    done
    fail "no Python 3.11 or 3.12 among: ${PYTHON:-python3.11, python3.12, python3}" "Install one, or name it: make setup PYTHON=/path/to/python3.11"
}

pip_install() { # --no-compile: pip compiles one file after the other, and there are 30,000 (compile_all)
    .venv/bin/python -m pip install --no-compile --disable-pip-version-check --no-input --no-deps "$@"
}

compile_all() { # by all cores; what is no Python of this version is left out, as pip does
    echo "      compiling" >&2
    .venv/bin/python -m compileall -qq -j 0 .venv/lib >>"$log" 2>&1 || true
}

show_progress() { # pip's output on stdin, the number of packages to come as $1
    local line seen=0
    while IFS= read -r line; do
        case $line in
        Collecting* | Processing* | "Requirement already"*)
            seen=$((seen + 1))
            if [ -t 2 ]; then
                printf '\r      %d of %d' "$seen" "$1"
            elif ((seen % 60 == 0)); then
                echo "      $seen of $1"
            fi
            ;;
        "Installing collected"*) printf '\n      unpacking\n' ;;
        esac
    done >&2
}

case $device in
cpu | cuda) ;;
*) fail "unknown device '$device'" "Use DEVICE=cpu or DEVICE=cuda" ;;
esac
[ "$(uname -s)" = Linux ] || fail "vLLM has packages for Linux only, this is $(uname -s)" "Use a Linux machine, a container or WSL"

if [ "$device" = cuda ]; then # before gigabytes are downloaded
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 || true)
    [ -z "$driver" ] || [ "${driver%%.*}" -ge 580 ] ||
        fail "driver $driver is too old for the pinned packages, which are of CUDA 13.0" "Install driver 580 or newer, or use DEVICE=cpu"
    glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null | cut -d' ' -f2 || true)
    [ -z "$glibc" ] || [ "$(printf '2.31\n%s\n' "$glibc" | sort -V | head -n 1)" = 2.31 ] ||
        fail "glibc $glibc is too old for the pinned packages" "Use a Linux with glibc 2.31 or newer, or a container of one"
fi

stamp=.venv/setup-$device.stamp
# Of pyproject.toml only what concerns the plugin: a new lint rule is no reason to install again.
inputs=$(cat setup/install.sh setup/common.txt "setup/$device.txt" <(sed '/^\[tool\.ruff/,$d' pyproject.toml) | sha256sum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$inputs" ]; then
    touch "$stamp"
    exit 0
fi

# The folder knows what it is for from its first moment, so that an interrupted install is never topped up for another device.
if [ -e .venv ] && { [ "$(cat .venv/device 2>/dev/null)" != "$device" ] || ! supported .venv/bin/python; }; then
    echo "setup: .venv is for another device or Python, or only begun; building it anew" >&2
    rm -rf .venv
fi

echo "[1/4] .venv for $device" >&2
# A .venv whose making was cut short or failed may have a Python and no pip.
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    rm -rf .venv
    python=$(find_python)
    "$python" -m venv .venv || fail "$python cannot build a virtual environment" "On Debian and Ubuntu: apt install python3-venv"
    echo "$device" >.venv/device
fi
rm -f "$stamp"
date >"$log"

echo "[2/4] torch $TORCH" >&2
if [ "$device" = cpu ]; then
    # CPU wheels of torch are not on the general index. pip finds one where it is configured to; uv knows PyTorch's own index.
    if ! pip_install --retries 1 "torch==$TORCH+cpu" >>"$log" 2>&1; then
        { pip_install "uv==$UV" && .venv/bin/python -m uv pip install --python .venv/bin/python --no-deps --torch-backend cpu "torch==$TORCH"; } >>"$log" 2>&1 ||
            fail "torch $TORCH for CPU could not be installed" "Check the network, or point pip's find-links at a folder with the wheel, then repeat"
    fi
fi

total=$(grep -chE '^[A-Za-z0-9]' setup/common.txt "setup/$device.txt" | awk '{ n += $1 } END { print n }')
echo "[3/4] $total packages, some minutes" >&2
pip_install -r "setup/$device.txt" 2>&1 | tee -a "$log" | show_progress "$total" ||
    fail "the packages of setup/$device.txt could not be installed" "Check the network and the disk (cpu 5 GB, cuda 12 GB), then repeat: what is installed stays"
compile_all

echo "[4/4] the vLLM plugin vllm_alora" >&2
pip_install --no-build-isolation --editable . >>"$log" 2>&1 || fail "the plugin could not be installed" "See $log"

echo "$inputs" >"$stamp"
