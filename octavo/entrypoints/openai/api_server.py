"""`python -m octavo.entrypoints.openai.api_server --model NAME ...`: the same as `octavo serve NAME ...`."""

from __future__ import annotations

import sys

from octavo.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
