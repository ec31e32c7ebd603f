"""Print requirements for pip: the lowest versions of dependencies that pyproject.toml allows, and tools to test them.

    python tools/lowest.py [ROOT]      default: the repository that holds this script

Those of the extra `test` have the versions of constraints.txt, for they run the tests and are not what is tested. What
they need beside that, and other transitive dependencies, is left to pip.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

SHIPPED = ("tracing",)
"""Extras whose dependencies are at their lowest, too."""
LEFT_OUT = "transformers"
"""An extra that needs newer dependencies than Octavo does."""
TOOLS = "test"
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)>=(?P<version>[\w.]+)(?P<marker>\s*;.*)?")


def lowest(requirements: list[str]) -> Iterator[str]:
    """Yield each requirement with its lower bound as the only version.

    Raises:
        ValueError: it is not of the form `name>=version`, with or without a marker.
    """
    for requirement in requirements:
        match = _REQUIREMENT.fullmatch(requirement)
        if match is None:
            raise ValueError(f"{requirement} in pyproject.toml has no lower bound; write it as name>=version")
        yield f"{match['name']}=={match['version']}{match['marker'] or ''}"


def pinned(requirements: list[str], constraints: list[str]) -> Iterator[str]:
    """Yield the lines of `constraints` for the requirements that apply everywhere."""
    names = {match["name"].lower() for one in requirements if (match := _REQUIREMENT.fullmatch(one))}
    for line in constraints:
        if line.partition("==")[0].lower().replace("_", "-") in names:
            yield line


def main(root: Path) -> int:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    shipped = [*project["dependencies"], *(one for name in SHIPPED for one in extras[name])]
    others = tuple(one.partition(">=")[0] for one in extras[LEFT_OUT])
    tools = [one for one in extras[TOOLS] if ";" not in one and not one.startswith(others)]
    constraints = (root / "constraints.txt").read_text(encoding="utf-8").splitlines()
    print(*lowest(shipped), *pinned(tools, constraints), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent))
