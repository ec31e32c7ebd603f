"""The deletion test: the engine must stand without any one of its features.

    python tools/deletion.py             static check, then the quick tests once for each feature made unimportable
    python tools/deletion.py --static    only the check that no core file names a feature

A feature is a folder in `octavo/features/`. Three places know it: the table in `features/__init__.py`, the folder
itself, and its own tests (`tests/**/features/<name>/`). Whatever else names it could not do without it.

The quick tests are the unit and property tests that are not marked slow: two or three minutes for each feature.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

QUICK = ("unit", "property")

BLOCKER = '''
import os, sys

class _Blocked:
    """Refuses to import the features named in OCTAVO_BLOCK_IMPORTS, as if their folders were gone."""

    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if any(name == n or name.startswith(n + ".") for n in self.names):
            raise ModuleNotFoundError(f"No module named {name!r} (blocked by the deletion test)", name=name)
        return None

sys.meta_path.insert(0, _Blocked(os.environ["OCTAVO_BLOCK_IMPORTS"].split(",")))
'''


def features(root: Path, package: str) -> list[str]:
    folder = root / package / "features"
    return sorted(p.name for p in folder.iterdir() if (p / "__init__.py").is_file()) if folder.is_dir() else []


def mentions(source: str, package: str, names: list[str]) -> Iterator[tuple[int, str]]:
    """(line, feature) of every import of a feature in the source, absolute or by a `features` package at hand."""
    prefix = f"{package}.features."
    for node in ast.walk(ast.parse(source)):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            targets = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            targets = [node.value]  # importlib.import_module("octavo.features.x")
        for target in targets:
            if target.startswith(prefix) and (name := target[len(prefix) :].split(".")[0]) in names:
                yield getattr(node, "lineno", 0), name


def static_check(root: Path, package: str) -> list[str]:
    """Complaints, one for each place outside the features that imports or names one."""
    names = features(root, package)
    complaints = []
    home = root / package / "features"
    for path in sorted((root / package).rglob("*.py")):
        if path.is_relative_to(home):
            own = path.relative_to(home).parts[0]
            others = [] if own == "__init__.py" else [n for n in names if n != own]
        else:
            others = names
        for line, name in sorted(set(mentions(path.read_text(encoding="utf-8"), package, others))):
            complaints.append(
                f"{path.relative_to(root)}:{line} names the feature '{name}'; only its own folder and the table may"
            )
    return complaints


def tests_without(root: Path, name: str) -> list[str]:
    """pytest arguments: the quick tests but those of the feature."""
    own = [p for p in (root / "tests").rglob(name) if p.is_dir() and p.parent.name == "features"]
    quick = [f"tests/{part}" for part in QUICK if (root / "tests" / part).is_dir()] or ["tests"]
    return [*quick, "-m", "not slow and not e2e and not gpu", *(f"--ignore={p.relative_to(root)}" for p in own)]


def run_without(root: Path, package: str, name: str, pytest_args: list[str]) -> int:
    """The tests' exit code with the feature unimportable, in child processes too."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(BLOCKER, encoding="utf-8")
        env = os.environ | {
            "OCTAVO_BLOCK_IMPORTS": f"{package}.features.{name}",
            "PYTHONPATH": os.pathsep.join(filter(None, [folder, str(root), os.environ.get("PYTHONPATH")])),
        }
        command = [sys.executable, "-m", "pytest", *tests_without(root, name), *pytest_args]
        return subprocess.run(command, cwd=root, env=env, check=False).returncode


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Checks that the engine stands without any one of its features.")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--package", default="octavo")
    parser.add_argument("--static", action="store_true", help="only check that no core file names a feature")
    parser.add_argument("pytest_args", nargs="*", help="passed to pytest (put -- before them)")
    args = parser.parse_args(argv)

    names = features(args.root, args.package)
    complaints = static_check(args.root, args.package)
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    if not names:
        print(f"{args.package}/features holds no feature: there is nothing to delete")
    elif not complaints:
        print(f"no core file names a feature ({', '.join(names)})")
    failed = []
    if not args.static:
        for name in names:
            print(f"== without {name}", flush=True)
            if run_without(args.root, args.package, name, args.pytest_args):
                failed.append(name)
        if failed:
            print(f"the tests fail without: {', '.join(failed)}", file=sys.stderr)
    return 1 if complaints or failed else 0


if __name__ == "__main__":
    sys.exit(main())
