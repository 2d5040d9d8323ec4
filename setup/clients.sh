#!/usr/bin/env bash
# Builds or updates .venv-clients, the environment of the contract tests' clients, with .venv's Python; run by `make test`.
# Returns at once when nothing it depends on changed. The log is .venv-clients/setup.log.
set -euo pipefail
cd "$(dirname "$0")/.."

log=.venv-clients/setup.log
stamp=.venv-clients/setup.stamp

fail() { # what went wrong, what to do about it
    echo "setup: $1" >&2
    [ ! -f "$log" ] || tail -n 8 "$log" | sed 's/^/  | /' >&2
    echo "setup: $2" >&2
    exit 1
}

inputs=$(cat setup/clients.sh setup/clients.txt <(.venv/bin/python -c 'import sys; print(sys.version)') | sha256sum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$inputs" ]; then
    touch "$stamp"
    exit 0
fi

total=$(grep -cE '^[A-Za-z0-9]' setup/clients.txt)
echo "clients: $total packages into .venv-clients, a minute or two" >&2
# Built anew: what a former list named and this one does not would stay.
rm -rf .venv-clients
.venv/bin/python -m venv .venv-clients || fail "no virtual environment" "On Debian and Ubuntu: apt install python3-venv"
date >"$log"
.venv-clients/bin/python -m pip install --disable-pip-version-check --no-input --no-deps -r setup/clients.txt >>"$log" 2>&1 ||
    fail "the packages of setup/clients.txt could not be installed" "Check the network and the disk (1.5 GB), then repeat"

echo "$inputs" >"$stamp"
