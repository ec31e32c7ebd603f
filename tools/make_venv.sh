#!/bin/sh
# make_venv.sh FOLDER: a virtual environment with the first Python >= 3.11 found; $PYTHON chooses another.
set -eu
venv=$1

new_enough() {
    command -v "$1" >/dev/null 2>&1 && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

python=
for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if new_enough "$candidate"; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    echo "octavo: Python 3.11 or newer is needed and was not found as ${PYTHON:-python3, python3.11, python3.12 or python3.13}." \
        "On Debian: apt install python3 python3-venv. Elsewhere: make PYTHON=/path/to/python3 ..." >&2
    exit 1
fi
if ! "$python" -c 'import venv, ensurepip' >/dev/null 2>&1; then
    echo "octavo: $python can't make virtual environments. On Debian: apt install python3-venv" >&2
    exit 1
fi
echo "Making $venv with $("$python" --version)"
"$python" -m venv "$venv"
