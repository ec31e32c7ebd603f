"""How many examples property tests try."""

from __future__ import annotations

import os


def examples(count: int) -> int:
    """Return `count` for nightly tests (`make test-all`), a sixth of it otherwise."""
    return count if "NIGHTLY_TESTS" in os.environ else max(1, count // 6)
