"""Count lines of Python by folder. Fail on files of the package over the limit, and on test files of the same name.

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


def repeated_names(root: Path) -> dict[str, list[str]]:
    """Return name -> test files, for names of several. Test folders are not packages, so pytest can import only one."""
    files: dict[str, list[str]] = defaultdict(list)
    for path in sorted((root / "tests").rglob("test_*.py")):
        files[path.name].append(path.relative_to(root).as_posix())
    return {name: paths for name, paths in files.items() if len(paths) > 1}


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
    repeated = repeated_names(root)
    for name, paths in repeated.items():
        print(
            f"{name} is the name of {' and '.join(paths)}, but pytest can import only one: rename the others",
            file=sys.stderr,
        )
    return 1 if long or repeated else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent))
