"""Lack of memory: the limit of this process's address space, and errors that name a remedy."""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Iterator
from pathlib import Path

from octavo.core.errors import ConfigError

_MIB, _GIB = 1 << 20, 1 << 30
_LEAST = 800 * _MIB
"""Bytes of address space that an engine needs before it reads weights: torch and numpy map 630 MiB, kernels the
rest."""
_MESSAGES = ("can't allocate memory", "Cannot allocate memory", "failed to map segment", "std::bad_alloc")
"""Error texts of torch, the C library, its loader and C++ for lack of memory, if the exception's class is generic."""
_NO_THREAD = "can't start new thread"


def address_space_left() -> int | None:
    """Return the bytes by which this process's address space may still grow (ulimit -v); None without a limit."""
    limit = _limit()
    if limit is None:
        return None
    import resource

    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        pages = 0
    return max(limit - pages * resource.getpagesize(), 0)


def check_address_space() -> None:
    """Check that torch can be imported; without enough address space, its libraries abort or hang instead of raising.

    Raises:
        ConfigError: `ulimit -v` leaves too little.
    """
    left = address_space_left()
    if left is not None and left < _LEAST and "torch" not in sys.modules:
        raise ConfigError(
            f"The engine's libraries need {_LEAST / _GIB:.2f} GiB of address space before any weights are loaded, but "
            f"{left / _GIB:.2f} GiB are left. {_raise_limit()}"
        )


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """Replace any out-of-memory error of the block by a ConfigError with a remedy."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # libraries report lack of memory by many types
        if not ran_out(error):
            raise
        raise ConfigError(
            f"Not enough memory: {str(error).rstrip('.') or type(error).__name__}. {_raise_limit()} Or lower "
            "--kv-cache-memory-bytes, --max-num-seqs or --max-num-batched-tokens, or use a smaller model."
        ) from error


def ran_out(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, reports a lack of memory."""
    while error is not None:
        text = str(error)
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
            return True
        if isinstance(error, (ImportError, RuntimeError)) and any(message in text for message in _MESSAGES):
            return True
        if _NO_THREAD in text and _limit() is not None:
            return True
        error = error.__cause__
    return False


def _raise_limit() -> str:
    limit = _limit()
    if limit is None:
        return "Free memory, or raise the limit of the container or service."
    return f"Raise the limit of {limit / _GIB:.2f} GiB on the address space (ulimit -v), or remove it."


def _limit() -> int | None:
    try:
        import resource
    except ImportError:  # Windows has no such limits
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit
