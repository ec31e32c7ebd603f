"""Compiles Octavo's C++ kernels with the machine's own compiler, the first time they are wanted.

The result lies in Octavo's cache folder under a name that changes with the sources, the compiler, its flags and the
processor, so nothing stale is ever loaded and nothing is ever overwritten.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from octavo.hub.cache import cache_dir

_log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent.parent / "ops" / "native"
COMPILERS = ("g++", "clang++", "c++")
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")
_TARGETS = (("-march=native",), ("-mcpu=native",), ())
_TIMEOUT_S = 180
_SELF_TEST = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).octavo_self_test())"


class NativeBuildError(Exception):
    """The kernels can't be had on this machine; the text says why, in one line."""


def load_library() -> ctypes.CDLL:
    """The kernels, compiled now or earlier. A failure is remembered for the life of the process.

    Raises:
        NativeBuildError: no compiler, or none that makes a library that works.
    """
    library = _load()
    if isinstance(library, NativeBuildError):
        raise library
    return library


@functools.cache
def _load() -> ctypes.CDLL | NativeBuildError:
    try:
        return _build(_compilers(), cache_dir() / "native")
    except NativeBuildError as error:
        return error


def _compilers() -> list[str]:
    named = os.environ.get("CXX")
    names = [named, *COMPILERS] if named else list(COMPILERS)
    return [path for path in map(shutil.which, names) if path]


def _build(compilers: list[str], folder: Path) -> ctypes.CDLL:
    """Tries each compiler with each target; the library of an earlier success is taken as it is."""
    problems = []
    for compiler in compilers:
        try:
            version = _run([compiler, "--version"])
        except NativeBuildError as error:
            problems.append(str(error))
            continue
        for target in _TARGETS:
            command = [compiler, *_FLAGS, *target]
            path = folder / f"octavo-{_digest(version, command)}.so"
            try:
                if not path.exists():
                    path = _compile(command, path)
                return ctypes.CDLL(str(path))
            except (NativeBuildError, OSError) as error:
                problems.append(f"{' '.join([compiler, *target])}: {error}")
    raise NativeBuildError("; ".join(problems) or f"no C++ compiler found (looked for {', '.join(COMPILERS)})")


def _digest(version: str, command: list[str]) -> str:
    digest = hashlib.sha256()
    for part in (version, *command, _processor()):
        digest.update(part.encode() + b"\0")
    for source in sorted(SOURCES.glob("*")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:24]


def _processor() -> str:
    """What -march=native depends on."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
    return f"{platform.machine()} {platform.processor()}"


def _compile(command: list[str], path: Path) -> Path:
    """Builds beside the final place and moves the result there, so that builders at the same time don't meet."""
    folder = _writable(path.parent)
    _log.info("compiling the attention kernels with %s, once", command[0])
    handle, name = tempfile.mkstemp(suffix=".tmp", dir=folder)
    os.close(handle)
    made = Path(name)
    try:
        _run([*command, *map(str, sorted(SOURCES.glob("*.cpp"))), "-o", str(made)])
        _run([sys.executable, "-c", _SELF_TEST, str(made)])
        made.chmod(0o755)
        os.replace(made, folder / path.name)
    finally:
        made.unlink(missing_ok=True)
    return folder / path.name


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
