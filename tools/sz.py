"""Count lines of Python by folder, and fail on a file of the package that exceeds the limit.

    python tools/sz.py [ROOT]      default: the repository that holds this script

All lines that are not blank count, docstrings and comments too.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

LIMIT = 500
PACKAGE = "octavo"
COUNTED = (PACKAGE, "tests", "conformance", "tools", "benchmarks")


def lines_of(path: Path) -> int:
    return sum(1 for line in path.read_text(encoding="utf-8").splitlines() if line.strip())


def too_long(root: Path, limit: int = LIMIT) -> list[tuple[str, int]]:
    """Return the files of the package whose physical length is over `limit` lines."""
    found = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        length = len(path.read_text(encoding="utf-8").splitlines())
        if length > limit:
            found.append((path.relative_to(root).as_posix(), length))
    return found


def folders(root: Path) -> dict[str, tuple[int, int]]:
    """Return folder, two levels deep -> (files, lines)."""
    totals: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for top in COUNTED:
        for path in (root / top).rglob("*.py"):
            parts = path.relative_to(root).parent.parts
            files, lines = totals["/".join(parts[:2])]
            totals["/".join(parts[:2])] = (files + 1, lines + lines_of(path))
    return dict(sorted(totals.items()))


def main(root: Path) -> int:
    table = folders(root)
    for folder, (files, lines) in table.items():
        print(f"{folder:24} {files:4} files {lines:7} lines")
    package = sum(lines for folder, (_, lines) in table.items() if folder.split("/")[0] == PACKAGE)
    print(f"{'the package':24} {'':10} {package:7} lines")
    long = too_long(root)
    for path, length in long:
        print(
            f"{path} has {length} lines, over the limit of {LIMIT}: split it by what its parts are about",
            file=sys.stderr,
        )
    return 1 if long else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent))
