"""Compiles Octavo's C++ kernels with the machine's own compiler, the first time they are wanted.

The result lies in Octavo's cache folder under a name that changes with the sources, the compiler and its flags, so
nothing stale is ever loaded and nothing is ever overwritten.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from octavo.core.errors import OctavoError
from octavo.hub.cache import kernel_dir
from octavo.native.isa import NAMES, Isa, usable

_log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "src"
COMPILERS = ("g++", "clang++", "c++")
_LONG = ("attention",)
"""Sources that take a compiler about three seconds. The others are compiled as one, which takes as long."""
SEPARATE = ("attention_int8", "blocks", "words")
"""Sources that not every model needs, of one to three seconds: each becomes a library of its own."""
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-pthread")
_TIMEOUT_S = 180
_ROOM = 4 << 20
"""Bytes: several times what a compilation leaves and needs besides."""
_WORK_PREFIX = "build-"
_building = threading.Lock()
_built: dict[str, _Built | NativeBuildError] = {}
_SELF_TEST = "import ctypes, sys; sys.exit(getattr(ctypes.CDLL(sys.argv[1]), 'octavo_self_test', int)())"


class NativeBuildError(Exception):
    """The kernels can't be had on this machine; the text says why, in one line."""


def load_library(isa: str = "auto", separate: Collection[str] = ()) -> ctypes.CDLL:
    """The kernels for an instruction set ("auto": the best that this processor has), compiled now or earlier.

    A failure is remembered for the life of the process.

    Args:
        separate: some of `SEPARATE` that will be wanted; they are compiled at the same time.

    Raises:
        NativeBuildError: no compiler, none that makes libraries that work, or the processor lacks `isa`.
    """
    with _building:
        built = _load(isa, separate)
        for source in separate:
            _load_separate(source, isa)
        return built.kernels


def load_separate(source: str, isa: str = "auto") -> ctypes.CDLL:
    """One of the `SEPARATE` libraries.

    Raises:
        NativeBuildError: as for `load_library`.
    """
    load_library(isa, (source,))
    return _load_separate(source, isa)


def level_of(isa: str) -> str:
    """The instruction set of `load_library(isa)`, which has been called."""
    return _load(isa, ()).level


def build_ahead(isa: str, separate: Callable[[], Collection[str]]) -> None:
    """Begin `load_library` in a thread, if nobody has yet: another caller then waits for the rest only."""

    def build() -> None:
        with contextlib.suppress(NativeBuildError, OctavoError):  # said to those who need the kernels
            load_library(isa, separate())

    threading.Thread(target=build, name="octavo-build", daemon=True).start()


@dataclass(frozen=True, slots=True)
class _Built:
    level: str
    kernels: ctypes.CDLL
    path: Path
    command: list[str]


def _load(isa: str, separate: Collection[str]) -> _Built:
    if isa not in _built:
        try:
            _built[isa] = _build(_levels(isa), _compilers(), kernel_dir() / "native", separate)
        except NativeBuildError as error:
            _built[isa] = error
    built = _built[isa]
    if isinstance(built, NativeBuildError):
        raise built
    return built


@functools.cache
def _load_separate(source: str, isa: str) -> ctypes.CDLL:
    built = _load(isa, (source,))
    name = _separate_name(built.path, source)
    return ctypes.CDLL(str(_provide(built.command, built.path.parent, {name: [[source]]})[name]))


def _separate_name(library: Path, source: str) -> str:
    return f"{library.stem}-{source}.so"


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


def _build(levels: list[Isa], compilers: list[str], folder: Path, separate: Collection[str]) -> _Built:
    """Tries each instruction set with each compiler; the libraries of an earlier success are taken as they are."""
    problems = []
    for level in levels:
        for compiler in compilers:
            try:
                command = [compiler, *_FLAGS, *level.compiler_flags]
                main = Path(f"octavo-{level.name}-{_digest(_run([compiler, '--version']), command)}.so")
                others = {_separate_name(main, source): [[source]] for source in separate}
                path = _provide(command, folder, {main.name: _units(), **others})[main.name]
                return _Built(level.name, ctypes.CDLL(str(path)), path, command)
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


_Units = list[list[str]]
"""Sources of a library, by what is compiled together."""


def _provide(command: list[str], folder: Path, libraries: Mapping[str, _Units]) -> dict[str, Path]:
    """Where libraries of these names lie; those that are not there are compiled."""
    found = {name: folder / name for name in libraries}
    lacking = [name for name, path in found.items() if not path.exists()]
    if lacking:
        parent = _writable(folder)
        found |= {name: parent / name for name in lacking}
        # Where an earlier start couldn't write where it should either, they are in that other place.
        _compile(command, parent, {name: libraries[name] for name in lacking if not found[name].exists()})
    return found


def _compile(command: list[str], parent: Path, libraries: Mapping[str, _Units]) -> None:
    """Builds beside the final place and moves the results there, so that builders at the same time don't meet.

    All compilers run at once, though there be fewer processors: taken in turns, the last would have the machine alone.
    """
    if not libraries:
        return
    _remove_leftovers(parent)
    _log.info("compiling the CPU kernels with %s, once", command[0])
    with (
        tempfile.TemporaryDirectory(dir=parent, prefix=_WORK_PREFIX) as work,
        ThreadPoolExecutor(sum(map(len, libraries.values()))) as pool,
    ):
        compiled = {
            name: [pool.submit(_compile_unit, command, unit, Path(work)) for unit in units]
            for name, units in libraries.items()
        }
        for name, objects in compiled.items():
            made = str(Path(work) / name)
            _run([*command, "-shared", *(str(each.result()) for each in objects), "-o", made])
            _run([sys.executable, "-c", _SELF_TEST, made])
            os.replace(made, parent / name)


def _remove_leftovers(parent: Path) -> None:
    """Of compilations that were killed; one that goes on can't be as old as this."""
    for folder in parent.glob(f"{_WORK_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > 4 * _TIMEOUT_S:
                shutil.rmtree(folder, ignore_errors=True)


def _compile_unit(command: list[str], sources: list[str], work: Path) -> Path:
    """The object file of some sources."""
    unit, result = work / f"{sources[0]}.cpp", work / f"{sources[0]}.o"
    unit.write_text("".join(f'#include "{SOURCES / source}.cpp"\n' for source in sources), encoding="utf-8")
    _run([*command, "-c", str(unit), "-o", str(result)])
    return result


def _units() -> _Units:
    """Those of the library that all models need, of about equal length, so that compilers side by side end together.

    Reading the standard library's headers takes a second, so the sources that take little more are one unit.
    """
    apart = {*_LONG, *SEPARATE}
    return [*([source] for source in _LONG), sorted(p.stem for p in SOURCES.glob("*.cpp") if p.stem not in apart)]


def _writable(folder: Path) -> Path:
    """The folder, or where it can't be written or is full one that lasts as long as the machine's temporary files."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK) and shutil.disk_usage(folder).free >= _ROOM:
            return folder
    return _own_temporary()


def _own_temporary() -> Path:
    """A folder for temporary files that is this user's alone, the same each time: what lies there will be run."""
    folder = Path(tempfile.gettempdir()) / f"octavo-native-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    there = folder.lstat()
    if stat.S_ISDIR(there.st_mode) and there.st_uid == os.getuid() and not there.st_mode & 0o077:
        return folder
    return Path(tempfile.mkdtemp(prefix="octavo-native-"))


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
