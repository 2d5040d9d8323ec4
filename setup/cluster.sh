#!/usr/bin/env bash
# Puts Ray into .venv: `bash setup/cluster.sh`, run by `make up REPLICAS=2` and `make test`, after `make setup`.
# Returns at once when nothing it depends on changed. The log is .venv/cluster.log.
set -euo pipefail
cd "$(dirname "$0")/.."

log=.venv/cluster.log
stamp=.venv/cluster.stamp

fail() { # what went wrong, what to do about it
    echo "setup: $1" >&2
    [ ! -f "$log" ] || tail -n 8 "$log" | sed 's/^/  | /' >&2
    echo "setup: $2" >&2
    exit 1
}

inputs=$(cat setup/cluster.sh setup/cluster.txt | sha256sum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$inputs" ]; then
    touch "$stamp"
    exit 0
fi

total=$(grep -cE '^[A-Za-z0-9]' setup/cluster.txt)
echo "cluster: Ray, $total packages into .venv, a minute" >&2
rm -f "$stamp"
date >"$log"
.venv/bin/python -m pip install --disable-pip-version-check --no-input --no-deps -r setup/cluster.txt >>"$log" 2>&1 ||
    fail "the packages of setup/cluster.txt could not be installed" "Check the network and the disk (0.5 GB), then repeat"

echo "$inputs" >"$stamp"
