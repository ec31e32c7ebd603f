#!/bin/sh
# install.sh VENV STAMP SPEC: install Octavo editable with SPEC's dependencies, at the versions in constraints.txt.
set -eu
venv=$1 stamp=$2 spec=$3

# The first time shows pip's progress, for torch alone is hundreds of megabytes; a later update is quick and quiet.
quiet=
if [ -e "$stamp" ]; then quiet=--quiet; fi
echo "Installing Octavo and its dependencies ($spec) into $venv"
"$venv/bin/python" -m pip install $quiet --disable-pip-version-check --no-input -c constraints.txt -e "$spec"
touch "$stamp"
