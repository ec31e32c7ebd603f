"""The user's own middleware, named on the command line."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware

from octavo.core.errors import ConfigError
from octavo.core.importing import imported


def load_middleware(paths: Sequence[str]) -> list[Middleware]:
    """Import middleware, in the given order.

    Args:
        paths: "package.module.name" (or "package.module:name") of an ASGI class, which is called with the application
            that it wraps, or of an `async def f(request, call_next)`.

    Raises:
        ConfigError: one can't be imported, or is neither.
    """
    return [_made(path, _named(path)) for path in paths]


def _named(path: str) -> Any:
    module, _, name = path.replace(":", ".").rpartition(".")
    if not module or not name:
        raise ConfigError(f"--middleware {path!r} must have the form package.module.name.")
    return imported(module, name, f"--middleware {path}")


def _made(path: str, found: Any) -> Middleware:
    is_class: bool = inspect.isclass(found)
    if is_class and _takes(found, 1):
        return Middleware(found)
    if inspect.iscoroutinefunction(found) and _takes(found, 2):
        return Middleware(BaseHTTPMiddleware, dispatch=found)
    raise ConfigError(
        f"--middleware {path} must be an ASGI class that is made with the application, or an "
        "async def f(request, call_next)."
    )


def _takes(found: Any, count: int) -> bool:
    """Return whether it can be called with `count` arguments."""
    try:
        inspect.signature(found).bind(*[None] * count)
    except TypeError:
        return False
    return True
