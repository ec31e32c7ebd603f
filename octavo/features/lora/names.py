"""`Names`: which names there are, and which weights each stands for.

Calls that load or find a name are done in the order of their arrival, so that it is certain which of two loads of one
name comes first: without `in_place`, the second is refused; with it, the second replaces the first. Files are read in a
thread; what they say comes into force in `poll`.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import msgspec

from octavo.core.errors import InvalidRequestError, ModelFileError, ModelNotFoundError, OctavoError
from octavo.core.futures import done
from octavo.features.lora.checks import Checker
from octavo.features.lora.layout import Manifest, Target, joined
from octavo.features.lora.payload import Source
from octavo.features.lora.requests import Adapter, Selection, already_loaded, gone
from octavo.features.lora.settings import LoraModule, LoraSettings
from octavo.features.lora.weights import AdapterWeights, State

log = logging.getLogger(__name__)

_MOST_SUMS = 64
"""Sums beyond which those are forgotten that nothing holds."""
_SIZES_KEPT = 16
"""Manifests whose numbers of blocks are kept: many adapters have the same."""
RESOLVERS = "octavo.lora_resolvers"
"""Group of entry points: functions (adapter's name) -> its path, or None, called in a thread for unknown names."""


@dataclass(slots=True)
class Known:
    """A name.

    Attributes:
        parent: name of its base model, if one was given; "" for the served model.
    """

    name: str
    path: Path
    parent: str
    weights: AdapterWeights


@dataclass(frozen=True, slots=True)
class _Found:
    """What was read about an adapter."""

    path: Path
    manifest: Manifest
    num_blocks: int
    file: bytes


@dataclass(slots=True)
class _Job:
    """A name to load (`path` is set) or to find."""

    name: str
    path: Path | None
    in_place: bool
    again: bool
    reading: Future[_Found | None]
    answer: Future[dict[str, Any]]


class Names:
    """
    Args:
        blocks_of: returns the blocks that an adapter takes.
        num_blocks: blocks of the KV cache.
        replaceable: see `payload.RankTargets`.
        retire: called with weights that no name leads to any more.

    Attributes:
        changes: grows when a name comes, goes or means another adapter.
    """

    def __init__(
        self,
        settings: LoraSettings,
        targets: Sequence[Target],
        blocks_of: Callable[[Manifest], int],
        num_blocks: int,
        retire: Callable[[AdapterWeights], None],
        *,
        replaceable: bool = True,
    ) -> None:
        self.changes = 0
        self._settings = settings
        self._targets = targets
        self._checker = Checker(targets, settings.highest_rank, settings.lora_extra_vocab_size)
        self._blocks_of = lru_cache(maxsize=_SIZES_KEPT)(blocks_of)
        self._num_blocks = num_blocks
        self._retire = retire
        self._replaceable = replaceable
        self._known: dict[str, Known] = {}
        self._sums: dict[tuple[tuple[int, float], ...], AdapterWeights] = {}
        self._uids = itertools.count(1)
        self._jobs: deque[_Job] = deque()
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="octavo-adapter-files")

    def __len__(self) -> int:
        return len(self._known)

    def add(self, module: LoraModule) -> None:
        """Load an adapter of the settings. Raises ModelFileError if it can't be used."""
        self._enter(module.name, self._read(module.path), module.base_model_name or "")

    def load(self, name: str, path: str, *, in_place: bool, again: bool) -> Future[dict[str, Any]]:
        """Load an adapter; see `requests.py`."""
        if not name or not path:
            raise InvalidRequestError("name and path must be texts that are not empty.", param="name", value=name)
        place = Path(path).expanduser()
        return self._submit(name, place, partial(self._read, place), in_place=in_place, again=again)

    def find(self, name: str) -> Future[dict[str, Any]]:
        """Find an adapter by its name, in --lora-dir and by resolvers, too; see `requests.py`."""
        known = self._known.get(name)
        if known is not None:
            return done({"adapter": _shown(known)})
        return self._submit(name, None, partial(self._search, name))

    def unload(self, name: str) -> AdapterWeights:
        """Forget a name; return the weights that it stood for."""
        known = self._known.pop(name)
        self.changes += 1
        self._give_up(known.weights)
        return known.weights

    def get(self, name: str) -> Known | None:
        return self._known.get(name)

    def all(self) -> list[dict[str, Any]]:
        """Return all adapters as they are shown, in the order in which they were loaded."""
        return [_shown(known) for known in self._known.values()]

    def poll(self) -> list[AdapterWeights]:
        """Do what has been read, in order. Return the adapters that were found for requests, which come next."""
        found = []
        while self._jobs and self._jobs[0].reading.done():
            job = self._jobs.popleft()
            try:
                job.answer.set_result(self._do(job))
                if job.path is None and (known := self._known.get(job.name)) is not None:
                    found.append(known.weights)
            except Exception as error:
                if not isinstance(error, OctavoError):
                    log.error("failed to load the adapter %s", job.name, exc_info=error)
                job.answer.set_exception(error)
        return found

    def weights_of(self, selection: Selection) -> AdapterWeights:
        """Return the weights of a request's adapters.

        Raises:
            InvalidRequestError: a name is unknown, or the adapters can't be summed.
        """
        found = []
        for part in selection:
            known = self._known.get(part.name)
            if known is None:
                raise gone(part.name)
            found.append((known.weights, part.weight))
        if len(found) == 1 and found[0][1] == 1.0:
            return found[0][0]
        key = tuple((weights.uid, factor) for weights, factor in found)
        return self._sums.get(key) or self._add_up(key, found)

    def forget_sum(self, weights: AdapterWeights) -> None:
        """Forget a sum that nothing holds; its next request makes another."""
        self._sums = {key: one for key, one in self._sums.items() if one is not weights}

    # Files

    def _submit(
        self,
        name: str,
        path: Path | None,
        read: Callable[[], _Found | None],
        *,
        in_place: bool = False,
        again: bool = True,
    ) -> Future[dict[str, Any]]:
        answer: Future[dict[str, Any]] = Future()
        self._jobs.append(_Job(name, path, in_place, again, self._threads.submit(read), answer))
        return answer

    def _read(self, path: Path) -> _Found:
        if not path.exists():
            raise ModelNotFoundError(
                f"There is no adapter at {path} on the engine's machine. Correct the path, that of --lora-modules "
                "(NAME=PATH) or of the request."
            )
        file = self._checker.read(path)
        if not self._replaceable:
            self._require_additions(path, file.manifest)
        num_blocks = self._blocks_of(file.manifest)
        if num_blocks > self._num_blocks:
            raise ModelFileError(
                f"{path} takes {num_blocks} blocks of the KV cache, which has {self._num_blocks}; start the "
                "engine with a larger --kv-cache-memory-bytes."
            )
        return _Found(path, file.manifest, num_blocks, file.packed())

    def _require_additions(self, path: Path, manifest: Manifest) -> None:
        """Raise ModelFileError unless the adapter changes linear layers only, by additions and gains."""
        for piece in manifest.pieces:
            target = self._targets[piece.target]
            if piece.replaces or target.embedding:
                raise ModelFileError(
                    f"{path} {'replaces' if piece.replaces else 'changes'} {target.name(piece.part)}, which several "
                    "ranks can't do with the CPU's kernels. Start the engine with --attention-backend torch."
                )

    def _search(self, name: str) -> _Found | None:
        folder = self._settings.lora_dir
        if folder is not None and Path(name).name == name and not name.startswith("."):
            for path in (Path(folder).expanduser() / name, Path(folder).expanduser() / f"{name}.gguf"):
                if path.exists():
                    return self._read(path)
        for entry in entry_points(group=RESOLVERS):
            found = entry.load()(name)
            if found is not None:
                return self._read(Path(found))
        return None

    # Names and weights

    def _do(self, job: _Job) -> dict[str, Any]:
        known = self._known.get(job.name)
        if known is not None and (job.path is None or (job.again and known.path == job.path)):
            return {"adapter": _shown(known)}
        if known is not None and not job.in_place:
            raise already_loaded(job.name)
        found = job.reading.result()
        return {"adapter": None if found is None else _shown(self._enter(job.name, found, ""))}

    def _enter(self, name: str, found: _Found, parent: str) -> Known:
        before = self._known.get(name)
        source = Source(str(found.path), found.manifest, file=found.file)
        weights = self._weights((name,), name, (source,), found.manifest, found.num_blocks)
        self._known[name] = Known(name, found.path, parent or (before.parent if before else ""), weights)
        self.changes += 1
        if before is not None:
            weights.pinned = before.weights.pinned
            self._give_up(before.weights)
        return self._known[name]

    def _add_up(
        self, key: tuple[tuple[int, float], ...], found: Sequence[tuple[AdapterWeights, float]]
    ) -> AdapterWeights:
        sources = tuple(msgspec.structs.replace(one.sources[0], weight=factor) for one, factor in found)
        label = " + ".join(f"{factor:g} {one.label}" for one, factor in found)
        for source, (one, _) in zip(sources, found, strict=True):
            manifest = source.manifest
            if manifest.invocation or any(piece.gain or piece.replaces for piece in manifest.pieces):
                raise InvalidRequestError(
                    f"The adapter {one.label!r} has DoRA magnitudes, saved modules, rows of tokens or invocation "
                    "tokens, so it can't be weighted or summed; use it alone, with weight 1.",
                    param="model",
                    value=one.label,
                )
        manifest = joined([source.manifest for source in sources])
        num_blocks = self._blocks_of(manifest)
        parts = tuple(one.uid for one, _ in found)
        names = tuple(one.label for one, _ in found)
        if len(self._sums) >= _MOST_SUMS:
            self._sums = {
                one: sum_ for one, sum_ in self._sums.items() if sum_.requests or sum_.state is not State.DISK
            }
        self._sums[key] = self._weights(names, label, sources, manifest, num_blocks, parts)
        return self._sums[key]

    def _weights(
        self,
        names: tuple[str, ...],
        label: str,
        sources: tuple[Source, ...],
        manifest: Manifest,
        num_blocks: int,
        parts: tuple[int, ...] = (),
    ) -> AdapterWeights:
        return AdapterWeights(
            next(self._uids),
            names,
            label,
            sources,
            manifest,
            num_blocks,
            general=manifest.general(self._targets),
            experts=manifest.changes_experts(self._targets),
            changes_keys=manifest.changes_keys(self._targets),
            gains=any(piece.gain for piece in manifest.pieces),
            added_tokens=manifest.added_tokens(self._targets),
            parts=parts,
        )

    def _give_up(self, weights: AdapterWeights) -> None:
        """Retire weights whose name is gone, and the sums that they are part of."""
        sums = [one for one in self._sums.values() if weights.uid in one.parts]
        for one in sums:
            self.forget_sum(one)
        for one in (weights, *sums):
            one.retired = True
            self._retire(one)


def _shown(known: Known) -> dict[str, Any]:
    weights = known.weights
    state = {State.READING: State.DISK, State.LOADING: State.HOST}.get(weights.state, weights.state)
    shown = Adapter(
        name=known.name,
        path=str(known.path),
        parent=known.parent,
        rank=weights.manifest.max_rank,
        state=state,
        pinned=weights.pinned,
    )
    found: dict[str, Any] = msgspec.to_builtins(shown)
    return found
