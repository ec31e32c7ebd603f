"""The toy feature "shelf", which keeps pages of the KV cache in a dictionary, among the features of this process.

`python -m shelf_kit` is a rank that has it, too.
"""

from __future__ import annotations

import sys
from pathlib import Path

import octavo.features

TOYS = Path(__file__).parent / "toy_features"


def install() -> None:
    octavo.features.__path__.append(str(TOYS))
    octavo.features.FEATURES = (*octavo.features.FEATURES, "shelf")


if __name__ == "__main__":
    install()
    from octavo.rank_main import main

    sys.exit(main(*sys.argv[1:]))
