"""What the engine half says to the worker half: payloads of steps, names of pages, methods of `WorkerHook.call`.

| method | arguments | result of each rank |
| --- | --- | --- |
| `targets` | | `RankTargets`: what adapters can change in this model |
| `read` | `Reading` | `ReadResult`, once the adapter can be loaded as pages, by `page_names` |
| `replaced` | | `{}`; the model has other weights now |
| `drop` | `uid` | `{}`; it can't be loaded any more, and its copy in the host's memory is freed |
| `forget` | `uid` | `{}`; as `drop`, and it is not in blocks, so that nothing of it is kept |

A uid stands for an adapter that was loaded, or for a weighted sum of several, and is never used again by an engine.
`read` may be called again for a uid that was dropped and is in no blocks; if the files have changed meanwhile, so has
the version.
Errors of `read` are those of files: OSError's become `ModelFileError`, and a shape or value that can't be used is an
`InvalidRequestError`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from octavo.features.lora.layout import Geometry, Manifest, Share, Target

NAME = "lora"

_UID_BYTES = 8
_PAGE_BYTES = 4


class RankTargets(msgspec.Struct, frozen=True):
    """The model, for adapters, and what a rank keeps of them.

    Attributes:
        targets: of the whole model, the same in all ranks.
        own: indices of those that the rank computes.
        slices, slice_bytes, element_size, by_output: of the rank's `Geometry`.
        replaceable: saved modules can take the place of layers, and embeddings can be changed.
    """

    targets: tuple[Target, ...]
    own: tuple[int, ...]
    slices: int
    slice_bytes: int
    element_size: int
    replaceable: bool = True
    by_output: bool = False

    @property
    def share(self) -> Share:
        geometry = Geometry(self.slices, self.slice_bytes, self.element_size, self.by_output)
        return Share(geometry, frozenset(self.own))


class Source(msgspec.Struct, frozen=True, array_like=True):
    """One of the adapters of a sum, or the only one.

    Attributes:
        path: its folder or file.
        manifest: what it has, by itself.
        weight: factor of its addition.
        file: the result of checking its files (`AdapterFile.packed`), which are checked again only if they have
            changed; b"" if not known.
    """

    path: str
    manifest: Manifest
    weight: float = 1.0
    file: bytes = b""


class Reading(msgspec.Struct, frozen=True):
    """Read adapters into the host's memory.

    Attributes:
        sources: the adapters, in the order in which their ranks are joined.
        manifest: of their sum; that of the source if there is one.
    """

    uid: int
    sources: tuple[Source, ...]
    manifest: Manifest


class ReadResult(msgspec.Struct, frozen=True):
    """What was read.

    Attributes:
        machine: name of the rank's machine.
        version: changes when the files do; only ranks of one machine have the same.
    """

    machine: str
    version: str


class AdapterEntry(msgspec.Struct, frozen=True, array_like=True):
    """An adapter that is in blocks of the device and can be used from this step on.

    Attributes:
        index: its row of the worker's tables, below `--max-loras`; what was there before is gone.
        blocks: those that hold it, in order.
    """

    index: int
    uid: int
    blocks: list[int]


class LoraStep(msgspec.Struct, frozen=True):
    """The adapters of a step; there is none if no row has one.

    Attributes:
        entries: adapters that came into use since the last payload. After a failed step, all in use are sent again.
        rows: index of each row's adapter, -1 for the base model; None if the rows are those of the step before.
        general: some row's adapter has more than low-rank additions; see `Manifest.general`.
        experts: some row's adapter changes experts.
        skipped: tokens at the beginning of each row that its adapter does not change; None if there are none.
    """

    entries: list[AdapterEntry] = []
    rows: list[int] | None = None
    general: bool = False
    experts: bool = False
    skipped: list[int] | None = None


PAYLOAD = LoraStep


def page_names(uid: int, count: int) -> list[bytes]:
    """Return the names of an adapter's pages, in their order."""
    return [uid.to_bytes(_UID_BYTES, "big") + number.to_bytes(_PAGE_BYTES, "big") for number in range(count)]


def pages_of(names: Sequence[bytes]) -> tuple[int, list[int]]:
    """Return the uid and the numbers of pages, given their names, which are all of one adapter."""
    uid = int.from_bytes(names[0][:_UID_BYTES], "big")
    return uid, [int.from_bytes(name[_UID_BYTES:], "big") for name in names]
