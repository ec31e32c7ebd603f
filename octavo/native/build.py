"""Compiles Octavo's C++ kernels with the machine's own compiler, the first time they are wanted.

The result lies in Octavo's cache folder under a name that changes with the sources, the compiler and its flags, so
nothing stale is ever loaded and nothing is ever overwritten.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from octavo.hub.cache import kernel_dir
from octavo.native.isa import NAMES, Isa, usable

_log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "src"
COMPILERS = ("g++", "clang++", "c++")
_LONG = ("attention", "blocks", "linear")
"""Sources that take a compiler about three seconds each. The others are compiled as one."""
_SEPARATE = ("attention_int8",)
"""Sources that few need: each becomes a library of its own, when it is first wanted."""
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-pthread")
_TIMEOUT_S = 180
_building = threading.Lock()
_SELF_TEST = "import ctypes, sys; sys.exit(getattr(ctypes.CDLL(sys.argv[1]), 'octavo_self_test', int)())"


class NativeBuildError(Exception):
    """The kernels can't be had on this machine; the text says why, in one line."""


def load_library(isa: str = "auto") -> ctypes.CDLL:
    """The kernels for an instruction set ("auto": the best that this processor has), compiled now or earlier.

    A failure is remembered for the life of the process.

    Raises:
        NativeBuildError: no compiler, none that makes a library that works, or the processor lacks `isa`.
    """
    built = _load_once(isa)
    if isinstance(built, NativeBuildError):
        raise built
    return built.kernels


def load_separate(source: str, isa: str = "auto") -> ctypes.CDLL:
    """One of the `_SEPARATE` libraries, for the processor that `load_library` found.

    Raises:
        NativeBuildError: as for `load_library`, or it can't be compiled.
    """
    load_library(isa)
    with _building:
        return _load_separate(source, isa)


def build_ahead(isa: str = "auto") -> None:
    """Begin to compile in a thread, if nobody has yet: a caller of `load_library` then waits for the rest only."""
    threading.Thread(target=_load_once, args=(isa,), name="octavo-build", daemon=True).start()


@dataclass(frozen=True, slots=True)
class _Built:
    kernels: ctypes.CDLL
    path: Path
    command: list[str]


def _load_once(isa: str) -> _Built | NativeBuildError:
    with _building:
        return _load(isa)


@functools.cache
def _load(isa: str) -> _Built | NativeBuildError:
    try:
        return _build(_levels(isa), _compilers(), kernel_dir() / "native")
    except NativeBuildError as error:
        return error


@functools.cache
def _load_separate(source: str, isa: str) -> ctypes.CDLL:
    built = _load(isa)
    assert isinstance(built, _Built), "`load_library` comes first"
    path = built.path.with_name(f"{built.path.stem}-{source}.so")
    if not path.exists():
        path = _compile(built.command, path, [[source]])
    return ctypes.CDLL(str(path))


def _levels(isa: str) -> list[Isa]:
    levels = usable()
    if isa == "auto":
        return levels
    chosen = [level for level in levels if level.name == isa]
    if not chosen:
        has = ", ".join(level.name for level in levels)
        known = "this processor has" if isa in NAMES else f"known are {', '.join(NAMES)}; this processor has"
        raise NativeBuildError(f"instruction set {isa!r} can't be used: {known} {has}")
    return chosen


def _compilers() -> list[str]:
    named = os.environ.get("CXX")
    names = [named, *COMPILERS] if named else list(COMPILERS)
    found = [path for path in map(shutil.which, names) if path]
    return list({os.path.realpath(path): path for path in reversed(found)}.values())[::-1]


def _build(levels: list[Isa], compilers: list[str], folder: Path) -> _Built:
    """Tries each instruction set with each compiler; the library of an earlier success is taken as it is."""
    problems = []
    for level in levels:
        for compiler in compilers:
            try:
                command = [compiler, *_FLAGS, *level.compiler_flags]
                path = folder / f"octavo-{level.name}-{_digest(_run([compiler, '--version']), command)}.so"
                if not path.exists():
                    path = _compile(command, path, _units())
                return _Built(ctypes.CDLL(str(path)), path, command)
            except (NativeBuildError, OSError) as error:
                problems.append(f"{compiler} for {level.name}: {error}")
    raise NativeBuildError(problems[0] if problems else f"no C++ compiler found (looked for {', '.join(COMPILERS)})")


def _digest(version: str, command: list[str]) -> str:
    digest = hashlib.sha256()
    for part in (version, *command):
        digest.update(part.encode() + b"\0")
    for source in sorted(SOURCES.glob("*")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:24]


def _compile(command: list[str], path: Path, units: list[list[str]]) -> Path:
    """Builds beside the final place and moves the result there, so that builders at the same time don't meet.

    Args:
        units: sources, by what is compiled together.
    """
    parent = _writable(path.parent)
    _log.info("compiling the CPU kernels with %s, once", command[0])
    with tempfile.TemporaryDirectory(dir=parent, prefix="build-") as folder:
        made = Path(folder) / path.name
        objects = [Path(folder) / f"{unit[0]}.o" for unit in units]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(functools.partial(_compile_unit, command), units, objects))
        _run([*command, "-shared", *map(str, objects), "-o", str(made)])
        _run([sys.executable, "-c", _SELF_TEST, str(made)])
        os.replace(made, parent / path.name)
    return parent / path.name


def _compile_unit(command: list[str], sources: list[str], result: Path) -> None:
    unit = result.with_suffix(".cpp")
    unit.write_text("".join(f'#include "{SOURCES / source}.cpp"\n' for source in sources), encoding="utf-8")
    _run([*command, "-c", str(unit), "-o", str(result)])


def _units() -> list[list[str]]:
    """What is compiled together, of about equal length, so that the compilers running side by side end together.

    Reading the standard library's headers takes a second, so the sources that take little more are one unit.
    """
    apart = {*_LONG, *_SEPARATE}
    return [*([source] for source in _LONG), sorted(p.stem for p in SOURCES.glob("*.cpp") if p.stem not in apart)]


def _writable(folder: Path) -> Path:
    """The folder, or where it can't be written a private one that lasts as long as the machine's temporary files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="octavo-native-"))
    return folder if os.access(folder, os.W_OK) else Path(tempfile.mkdtemp(prefix="octavo-native-"))


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeBuildError(f"{command[0]} did not run: {error}") from error
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        reason = next((line for line in lines if "error" in line), lines[-1] if lines else "no message")
        raise NativeBuildError(f"{command[0]} ended with status {done.returncode}: {reason.strip()[:300]}")
    return done.stdout
