"""`python -m octavo.cli.pool_child`: the server process of one of several models. Started only by `octavo/pool/`."""

from __future__ import annotations

import sys

from octavo.cli.start import open_frontend
from octavo.pool.child_main import main

if __name__ == "__main__":
    sys.exit(main(open_frontend))
