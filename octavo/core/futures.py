"""Small functions on `concurrent.futures.Future`: results that are known already, and results of results."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
U = TypeVar("U")


def done(value: T) -> Future[T]:
    """Return a future that has this result."""
    future: Future[T] = Future()
    future.set_result(value)
    return future


def failed(error: Exception) -> Future[Any]:
    """Return a future that has failed with this error."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def mapped(source: Future[T], function: Callable[[T], U]) -> Future[U]:
    """Return the future of `function` of the source's result. It fails as the source or the function does.

    The function is called where the source gets its result: it must be short.
    """
    future: Future[U] = Future()

    def take(ended: Future[T]) -> None:
        try:
            future.set_result(function(ended.result()))
        except Exception as error:
            future.set_exception(error)

    source.add_done_callback(take)
    return future
