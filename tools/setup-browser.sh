#!/usr/bin/env bash
# Installs what the browser tests of the console need: playwright into .venv, and Debian's Chromium.
# Playwright's own download of a browser is not used.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
echo "setup: installing playwright for the browser tests" >&2
.venv/bin/python -m pip install --quiet --editable '.[dev,browser]'
if ! command -v chromium >/dev/null; then
    echo "setup: installing chromium" >&2
    sudo=$([ "$(id -u)" -eq 0 ] || echo sudo)
    $sudo apt-get update -qq
    $sudo apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core >/dev/null
fi
touch .venv/.browser-installed
