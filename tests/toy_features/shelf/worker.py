from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from octavo.features import FeatureContext
from octavo.worker.hooks import WorkerHook

PAGES: dict[bytes, Tensor] = {}


class ShelfWorker(WorkerHook):
    name = "shelf"

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="shelf")

    def store(self, names: Sequence[bytes], pages: Tensor) -> Future[Collection[int]]:
        return self._threads.submit(self._store, names, pages)

    def load(self, names: Sequence[bytes], pages: Tensor) -> Future[Collection[int]]:
        return self._threads.submit(self._load, names, pages)

    def _store(self, names: Sequence[bytes], pages: Tensor) -> Collection[int]:
        PAGES.update(zip(names, pages, strict=True))
        return ()

    def _load(self, names: Sequence[bytes], pages: Tensor) -> Collection[int]:
        missing = [i for i, name in enumerate(names) if name not in PAGES]
        for i, name in enumerate(names):
            if i not in missing:
                pages[i] = PAGES[name]
        return missing


def build_worker(context: FeatureContext) -> ShelfWorker:
    return ShelfWorker()
