"""Calls of an engine's worker by name, as training frameworks make them. Only the names in `METHODS` are allowed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.core.errors import EngineDeadError, InvalidRequestError, UnsupportedError
from octavo.engine.protocol import EngineClient

METHODS = ("check_health", "get_weight_version", "profile", "reload_weights", "reset_prefix_cache")


class CoreCalls:
    """The callable methods, for an engine in another process."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    async def check_health(self) -> None:
        health = self._engine.health()
        if not health.ok:
            raise EngineDeadError(health.reason)

    async def get_weight_version(self) -> str:
        return self._engine.stats().weight_version

    async def profile(self, is_start: bool = True, profile_prefix: str | None = None) -> str | None:
        """Start a profile, or stop it and return its path."""
        if not is_start:
            return await self._engine.stop_profile()
        await self._engine.start_profile(profile_prefix or "")
        return None

    async def reload_weights(
        self, weights_path: str | None = None, is_checkpoint_format: bool = True, weight_version: str | None = None
    ) -> None:
        """Read the weights of another checkpoint, by default those that were read last."""
        check_format(is_checkpoint_format)
        await self._engine.update_weights(weights_path, version=weight_version)

    async def reset_prefix_cache(self) -> None:
        await self._engine.reset_prefix_cache()


def bound(calls: object, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a method by name and return its result, for `CoreCalls` an awaitable.

    Raises:
        InvalidRequestError: the method or an argument is unknown, or an argument has the wrong type.
    """
    if method not in METHODS:
        raise InvalidRequestError(f"method must be one of {', '.join(METHODS)}.", param="method", value=method)
    call = getattr(calls, method)
    try:
        given = inspect.signature(call).bind(*args, **kwargs)
    except TypeError as error:
        raise InvalidRequestError(f"{method}: {error}.", param="args") from None
    for name, value in given.arguments.items():
        wanted = bool if name.startswith("is_") else str
        if value is not None and type(value) is not wanted and name != "weights_iterator":
            kind = "true or false" if wanted is bool else "a string"
            raise InvalidRequestError(f"{method}: {name} must be {kind}.", param=name, value=value)
    return call(*given.args, **given.kwargs)


def check_format(is_checkpoint_format: bool) -> None:
    """Raise UnsupportedError unless weights are in the format of checkpoints."""
    if not is_checkpoint_format:
        raise UnsupportedError(
            "is_checkpoint_format must be true: weights must be in the format of checkpoints.",
            param="is_checkpoint_format",
        )
