#!/usr/bin/env bash
# Makes .venv and installs popmq into it: with its development tools, or what a user needs alone.
#
#   tools/setup.sh [dev|user]
#
# Needs a Python >= 3.11 with pip; works without the venv/ensurepip package by fetching
# virtualenv into .venv-bootstrap.  Does nothing when .venv is younger than pyproject.toml.
# PYTHON=path chooses the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
bootstrap=.venv-bootstrap
what=${1:-dev}
case $what in
    dev) stamp=$venv/.installed packages='.[dev]' name='popmq and its development tools' ;;
    user) stamp=$venv/.user-installed packages='.[cli,client]' name='popmq and the official Python client' ;;
    *) printf 'usage: tools/setup.sh [dev|user]\n' >&2; exit 2 ;;
esac
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

say() { printf 'setup: %s\n' "$*" >&2; }

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

# Debian's python3 without python3-venv and python3-pip runs, and cannot make an environment.
can_install() {
    new_enough "$1" && { "$1" -c 'import ensurepip, venv' || "$1" -m pip --version; } >/dev/null 2>&1
}

# The distribution's Python comes first: it is built with profile-guided optimization, which one
# that a version manager compiled here seldom is, and popmq then costs a fifth less CPU.
# A version manager may put a python3.13 on PATH that only prints an error, so each
# candidate is run, not just looked up.
find_python() {
    if [ -n "${PYTHON:-}" ]; then
        new_enough "$PYTHON" && { printf '%s\n' "$PYTHON"; return; }
        say "PYTHON=$PYTHON does not run, or is older than 3.11"
        return 1
    fi
    local candidate enough
    for enough in can_install new_enough; do
        for candidate in /usr/bin/python3 python3.13 python3.12 python3.11 python3; do
            "$enough" "$candidate" && { printf '%s\n' "$candidate"; return; }
        done
    done
    say "no Python >= 3.11 found; install one (Debian, Ubuntu: sudo apt-get install python3 python3-pip)"
    say "or name one: make setup PYTHON=/path/to/python3.11"
    return 1
}

make_with_virtualenv() {
    local python=$1
    if ! "$python" -m pip --version >/dev/null 2>&1; then
        say "$python has neither a working venv module nor pip; one of these installs what is missing:"
        say "  sudo apt-get install python3-venv     (Debian, Ubuntu)"
        say "  sudo dnf install python3-pip          (Fedora)"
        return 1
    fi
    say "$python -m venv does not work here; fetching virtualenv into $bootstrap"
    rm -rf "$bootstrap"
    # Nothing outside $bootstrap is touched, so the marker that keeps pip away from the
    # system's own packages does not apply; older pips do not know the variable.
    PIP_BREAK_SYSTEM_PACKAGES=1 PIP_USER=0 "$python" -m pip install \
        --quiet --target "$bootstrap" virtualenv || return 1
    PYTHONPATH=$bootstrap "$python" -m virtualenv --quiet "$venv" || return 1
    rm -rf "$bootstrap"
}

make_venv() {
    local python=$1
    rm -rf "$venv"
    "$python" -m venv "$venv" >/dev/null 2>&1 && "$venv/bin/python" -m pip --version >/dev/null 2>&1 && return
    rm -rf "$venv"
    make_with_virtualenv "$python"
}

if [ -e "$stamp" ] && [ ! pyproject.toml -nt "$stamp" ]; then
    exit 0
fi

if ! { new_enough "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; }; then
    python=$(find_python) || exit 1
    say "making $venv with $("$python" --version)"
    make_venv "$python" || exit 1
fi

say "installing $name"
"$venv/bin/python" -m pip install --quiet --editable "$packages"
touch "$stamp"
# The development tools include what a user needs.
[ "$what" = dev ] && touch "$venv/.user-installed"
say "done: $(du -sm "$venv" | cut -f1) MB in $venv, $SECONDS s"
