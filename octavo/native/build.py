"""Compile Octavo's C++ kernels with the machine's compiler at their first use.

The libraries are stored in Octavo's cache folder under names that depend on the sources, the compiler and its flags, so
stale libraries are never loaded and none is ever overwritten.
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
import struct
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
"""Sources that take about three seconds to compile. All others are compiled as one unit, which takes as long."""
SEPARATE = ("attention_int8", "blocks", "codes", "experts", "latent", "recurrent", "words")
"""Sources that not every model needs, one to three seconds each: each becomes a separate library."""
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-pthread")
_TIMEOUT_S = 180
_ROOM = 4 << 20
"""Free bytes required: several times the size of the libraries and the compiler's temporary files."""
_WORK_PREFIX = "build-"
_building = threading.Lock()
_built: dict[str, _Built | NativeBuildError] = {}
_ELF_HEADER = struct.Struct("<40xQ10xHH2x")
"""Of a 64-bit file: the place of the table of sections, the size of an entry, and their number."""

_SELF_TEST = "import ctypes, sys; sys.exit(getattr(ctypes.CDLL(sys.argv[1]), 'octavo_self_test', int)())"


class NativeBuildError(Exception):
    """The kernels can't be compiled or loaded on this machine; the text gives the reason in one line."""


def load_library(isa: str = "auto", separate: Collection[str] = ()) -> ctypes.CDLL:
    """Return the kernels for an instruction set ("auto": the best of this processor), compiled now or earlier.

    A failure is cached for the life of the process.

    Args:
        isa: a name of `isa.NAMES`, or "auto".
        separate: names of `SEPARATE` that will be needed; they are compiled at the same time.

    Raises:
        NativeBuildError: no compiler was found, none produces working libraries, or the processor lacks `isa`.
    """
    with _building:
        built = _load(isa, separate)
        for source in separate:
            _load_separate(source, isa)
        return built.kernels


def load_separate(source: str, isa: str = "auto") -> ctypes.CDLL:
    """Return one of the `SEPARATE` libraries.

    Raises:
        NativeBuildError: as for `load_library`.
    """
    load_library(isa, (source,))
    return _load_separate(source, isa)


def level_of(isa: str) -> str:
    """Return the instruction set of `load_library(isa)`, which must have been called."""
    return _load(isa, ()).level


def compilers() -> list[str]:
    """Return the paths of the C++ compilers of this machine, in the order in which they are tried: $CXX first."""
    named = os.environ.get("CXX")
    names = [named, *COMPILERS] if named else list(COMPILERS)
    found = [path for path in map(shutil.which, names) if path]
    return list({os.path.realpath(path): path for path in reversed(found)}.values())[::-1]


def build_ahead(isa: str, separate: Callable[[], Collection[str]]) -> None:
    """Start `load_library` in a thread, unless it was called; a later caller waits only for the remaining time."""

    def build() -> None:
        with contextlib.suppress(NativeBuildError, OctavoError):  # raised again for callers that need the kernels
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
            _built[isa] = _build(_levels(isa), compilers(), kernel_dir() / "native", separate)
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


def _build(levels: list[Isa], found: list[str], folder: Path, separate: Collection[str]) -> _Built:
    """Try each instruction set with each compiler; reuse libraries that were compiled earlier."""
    problems = []
    for level in levels:
        for compiler in found:
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
"""Sources of a library, by compilation unit."""


def _provide(command: list[str], folder: Path, libraries: Mapping[str, _Units]) -> dict[str, Path]:
    """Return the paths of libraries by name, compiling those that are missing or cut short."""
    found = {name: folder / name for name in libraries}
    lacking = [name for name, path in found.items() if not _is_whole(path)]
    if lacking:
        parent = _writable(folder)
        found |= {name: parent / name for name in lacking}
        # If an earlier start could not write to `folder` either, they may be in `parent` already.
        _compile(command, parent, {name: libraries[name] for name in lacking if not _is_whole(found[name])})
    return found


def _is_whole(library: Path) -> bool:
    """Return whether a library is there with all of its bytes. After a power failure it may not be; to load it then
    fails, or kills the process (SIGBUS). An ELF file ends with its table of sections, or after it (elf(5))."""
    with contextlib.suppress(OSError), library.open("rb") as file:
        head, size = file.read(_ELF_HEADER.size), os.fstat(file.fileno()).st_size
        if not sys.platform.startswith("linux"):
            return size > 0
        if head.startswith(b"\x7fELF") and len(head) == _ELF_HEADER.size:
            place, each, number = _ELF_HEADER.unpack(head)
            return bool(place + each * number <= size)
    return False


def _compile(command: list[str], parent: Path, libraries: Mapping[str, _Units]) -> None:
    """Compile in a temporary folder and move the results into place, so that concurrent builds don't conflict.

    All compilers run at once, even on fewer processors: in sequence, the last would run alone.
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
            with open(made, "rb") as library:
                os.fsync(library.fileno())
            os.replace(made, parent / name)


def _remove_leftovers(parent: Path) -> None:
    """Remove folders of killed compilations, by their age, which no running compilation reaches."""
    for folder in parent.glob(f"{_WORK_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > 4 * _TIMEOUT_S:
                shutil.rmtree(folder, ignore_errors=True)


def _compile_unit(command: list[str], sources: list[str], work: Path) -> Path:
    """Compile some sources as one unit; return the object file."""
    unit, result = work / f"{sources[0]}.cpp", work / f"{sources[0]}.o"
    unit.write_text("".join(f'#include "{SOURCES / source}.cpp"\n' for source in sources), encoding="utf-8")
    _run([*command, "-c", str(unit), "-o", str(result)])
    return result


def _units() -> _Units:
    """Return the main library's compilation units, of about equal duration, since they are compiled in parallel.

    Parsing the standard library's headers takes a second, so all short sources form one unit.
    """
    apart = {*_LONG, *SEPARATE}
    return [*([source] for source in _LONG), sorted(p.stem for p in SOURCES.glob("*.cpp") if p.stem not in apart)]


def _writable(folder: Path) -> Path:
    """Return the folder, or a temporary one if it is full or can't be written to."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK) and shutil.disk_usage(folder).free >= _ROOM:
            return folder
    return _own_temporary()


def _own_temporary() -> Path:
    """Return a temporary folder, always the same, that only this user can write to, since its libraries are
    executed."""
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
