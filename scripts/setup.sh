#!/usr/bin/env bash
# Makes .venv with this package and the tested versions of torch and megatron-core.
# Does nothing when .venv is up to date. PYTHON=/path/to/python chooses the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
constraints=requirements/cpu-tested.txt
stamp=$venv/.installed-from
wanted=$(cat pyproject.toml setup.py "$constraints" scripts/setup.sh | cksum; pwd)

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && "$venv/bin/python" -c '' 2>/dev/null; then
    exit 0
fi

say() { printf 'setup: %s\n' "$*" >&2; }

# Whether a command is a Python that megatron-core has wheels for. A pyenv shim of a version that
# is not selected exists, but fails here.
suitable() {
    "$@" -c 'import sys; sys.exit(not (3, 12) <= sys.version_info < (3, 14))' >/dev/null 2>&1
}

has_venv() { "$1" -c 'import ensurepip, venv' >/dev/null 2>&1; }

candidates() {
    [ -z "${PYTHON:-}" ] || printf '%s\n' "$PYTHON"
    printf '%s\n' python3.12 python3.13 python3 python
    local folder
    for folder in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[23]*; do
        [ ! -x "$folder/bin/python" ] || printf '%s\n' "$folder/bin/python"
    done
    if command -v uv >/dev/null; then
        uv python find 3.12 2>/dev/null || uv python find 3.13 2>/dev/null || true
    fi
}

make_venv() {
    local python without_venv=
    rm -rf "$venv"
    while IFS= read -r python; do
        suitable "$python" || continue
        if has_venv "$python"; then
            say "$("$python" --version) ($python)"
            "$python" -m venv "$venv"
            return
        fi
        without_venv=${without_venv:-$python}
    done < <(candidates)
    if command -v uv >/dev/null; then # uv fetches a Python where there is none
        uv venv --seed --python "${without_venv:-3.12}" "$venv"
        return
    fi
    if [ -n "$without_venv" ]; then
        say "$without_venv has no venv module. On Debian: apt-get install python3-venv"
    else
        say "no Python 3.12 or 3.13 found. Looked for, in this order:"
        candidates | sed 's/^/setup:   /' >&2
        say "and for uv. Install one of them (for example: pyenv install 3.12), or name one:"
        say "PYTHON=/path/to/python3.12 make setup"
    fi
    exit 1
}

if ! suitable "$venv/bin/python" || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    make_venv
fi
say "installing into $venv (torch and megatron-core: some minutes, about 5 GB)"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    --constraint "$constraints" --editable '.[dev]'
printf '%s\n' "$wanted" >"$stamp"
say "done"
