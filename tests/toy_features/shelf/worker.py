from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

from octavo.core.errors import InvalidRequestError
from octavo.features import FeatureContext
from octavo.worker.hooks import Site, WorkerHook

PAGES: dict[tuple[int, bytes], Tensor] = {}
"""(rank, name) -> the rank's part of a page."""


class ShelfWorker(WorkerHook):
    name = "shelf"

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="shelf")

    def attach(self, model: Any, site: Site) -> None:
        self._rank = site.rank

    def call(self, method: str, args: Mapping[str, Any]) -> Any:
        if method != "count":
            return super().call(method, args)
        if args["above"] < 0:
            raise InvalidRequestError("above must be at least 0.", param="above", value=args["above"])
        return self._threads.submit(lambda: sum(page.nbytes > args["above"] for page in PAGES.values()))

    def store(self, names: Sequence[bytes], pages: Tensor) -> Future[Collection[int]]:
        return self._threads.submit(self._store, names, pages)

    def load(self, names: Sequence[bytes], room: Callable[[], Tensor]) -> Future[Collection[int]]:
        return self._threads.submit(self._load, names, room)

    def _store(self, names: Sequence[bytes], pages: Tensor) -> Collection[int]:
        PAGES.update(((self._rank, name), page) for name, page in zip(names, pages.clone(), strict=True))
        return ()

    def _load(self, names: Sequence[bytes], room: Callable[[], Tensor]) -> Collection[int]:
        pages = room()
        missing = [i for i, name in enumerate(names) if (self._rank, name) not in PAGES]
        for i, name in enumerate(names):
            if i not in missing:
                pages[i] = PAGES[self._rank, name]
        return missing


def build_worker(context: FeatureContext) -> ShelfWorker:
    return ShelfWorker()
