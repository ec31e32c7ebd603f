"""`MediaWorker`: the worker half. It encodes images, frames and audio, keeps the results, and writes those of a step
over the embeddings of the placeholders."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from octavo.core.errors import ConfigError, InvalidRequestError, UnsupportedError
from octavo.core.plan import StepPlan
from octavo.device.transfer import upload
from octavo.features import FeatureContext
from octavo.features.media.kinds import kind_of
from octavo.features.media.payload import NAME, MediaStep
from octavo.features.media.preprocessing import (
    make_processor,
    most_of_videos,
    own_fields,
    processor_config,
    refusals,
)
from octavo.features.media.processors.base import LoadTokenizer
from octavo.features.media.sample import sample_item
from octavo.features.media.settings import MediaSettings
from octavo.features.media.towers.tower import Encoding, Tower, has_tower, load_tower
from octavo.hub.files import ModelFiles
from octavo.models.load.checkpoint import Checkpoint
from octavo.models.load.weights import replace_weights
from octavo.models.model import EncoderModel, Model, ModelSpec
from octavo.models.spec import DecoderSpec
from octavo.nn.build import Build
from octavo.nn.quant.base import everywhere
from octavo.nn.quant.none import Unquantized
from octavo.worker.hooks import Reserved, Site, WorkerHook
from octavo.worker.worker import Worker

log = logging.getLogger(__name__)

_PATCHES_BETWEEN_STEPS = 4 * 1024
"""Patches that a GPU encodes between two steps."""
_SECONDS_BETWEEN_STEPS = 0.02
"""Seconds from which on a CPU computes steps before the next layer."""
_WORKSPACE_PATCHES = 4 * 1024
_SHIFTED = "shifted"


@dataclass(slots=True, eq=False)
class _Begun:
    """An item that is encoded, as in `MediaItem`."""

    digest: bytes
    shape: Sequence[int]
    layout: Sequence[int]
    count: int
    data: bytes | memoryview
    dtype: str
    encoding: Encoding | None = None


class MediaWorker(WorkerHook):
    """The tower of a rank, which each rank has whole, and what it has encoded."""

    name = NAME

    def __init__(
        self, files: ModelFiles, settings: MediaSettings, load_tokenizer: LoadTokenizer, most: int = 0
    ) -> None:
        """
        Args:
            most: embeddings of the largest item of a video.
        """
        self._files, self._settings, self._load_tokenizer, self._most = files, settings, load_tokenizer, most
        self._processor = processor_config(files) | own_fields(files.config, settings.mm_processor_kwargs)
        self._tower: Tower | None = None
        self._encoded: dict[bytes, Tensor] = {}
        self._begun: list[_Begun] = []
        self._threads = torch.get_num_threads()
        self._capacity = self._hidden = 0
        self._device = torch.device("cpu")
        self._timed: list[tuple[Any, Any]] = []
        kind = kind_of(files.config)
        self._axes, self._mutual = kind.axes, kind.mutual
        self.looks_ahead = kind.mutual
        self._after: dict[int, int] = {}
        """Slot -> what is added to the positions of all tokens after its prompt, if it has images."""
        self._shifts = torch.empty(0)
        self._shifted = False
        self._used = 0
        """Entries of the buffer that may not be 0."""

    def prepare(self, worker: Worker, limits: tuple[int, int]) -> Reserved:
        self._threads = worker.settings.threads or self._threads
        self._load(worker.dtype, worker.device.torch_device, worker.checkpoint())
        tower = self._tower
        assert tower is not None
        size = tower.hidden_size
        if size != worker.spec.hidden_size:
            raise ConfigError(
                f"The tower of {self._files.name} makes embeddings of {size} numbers, and its decoder has "
                f"{worker.spec.hidden_size}. Get the files that belong together."
            )
        self._check_axes(worker.spec)
        self._hidden = size
        self._capacity, reserved = memory_of(tower, self._settings, worker.spec.max_position, limits, self._most)
        if worker.device.resident:
            self._rehearse()
        return reserved

    def _check_axes(self, spec: ModelSpec) -> None:
        if self._axes and isinstance(spec, DecoderSpec) and not spec.rope.axes:
            raise ConfigError(
                f"{self._files.name}: positions of its images are along rows and columns, but its config has no "
                "mrope_section. Get the config.json that belongs to the model, or set --limit-mm-per-prompt "
                "'{\"image\": 0}' to serve it for text only."
            )

    def restage(self, checkpoint: Checkpoint) -> Callable[[], None] | None:
        """Read a tower in the host's memory."""
        served = self._tower
        if served is None or not has_tower(checkpoint, served):
            return None
        cpu = torch.device("cpu")
        build = Build(served.dtype, cpu, None, everywhere(Unquantized, served.dtype, cpu))
        new = load_tower(self._files.config, self._processor, build, checkpoint)

        def put() -> None:
            replace_weights(served, new, in_place=self._device.type != "cpu")
            self._encoded.clear()
            for one in self._begun:  # what the old tower has begun
                one.encoding = None

        return put

    def attach(self, model: Model | EncoderModel, site: Site) -> None:
        if self._tower is None:  # after a sleep
            self._load(site.build.dtype, site.build.device, site.checkpoint())

    def detach(self) -> None:
        self._tower = None
        self._encoded.clear()
        self._begun.clear()
        self._timed.clear()

    def _load(self, dtype: torch.dtype, device: torch.device, checkpoint: Checkpoint) -> None:
        build = Build(dtype, device, None, everywhere(Unquantized, dtype, device))
        self._device = device
        self._tower = load_tower(self._files.config, self._processor, build, checkpoint)

    def _rehearse(self) -> None:
        """Encode a sample, so that libraries load their kernels now and not between the tokens of others."""
        began = time.perf_counter()
        processor = make_processor(self._files.config, self._processor, self._load_tokenizer)
        item = sample_item(processor, kind_of(self._files.config).modality)
        one = _Begun(b"", item.data.shape, item.layout, item.count, item.data.tobytes(), item.data.dtype.str)
        while (error := self._advance(one)) is None:
            pass
        self._encoded.clear()
        if error:
            log.warning("a sample could not be encoded at the start: %s", error)
        log.info("encoded a sample in %.2f s", time.perf_counter() - began)

    def call(self, method: str, args: Mapping[str, Any]) -> Any:
        match method:
            case "describe":
                assert self._tower is not None
                together = 1 if self._device.type == "cpu" else _PATCHES_BETWEEN_STEPS * self._tower.patch_numbers
                return {"capacity": self._capacity, "budget": together}
            case "encode":
                return self._encode(args["keep"], args["items"])
        raise InvalidRequestError(f"The feature {self.name!r} has no method {method!r}.", param="method", value=method)

    def _encode(self, keep: list[bytes], items: list[Any]) -> dict[str, Any]:
        """Drop what is not kept, begin to encode items, and go on with those begun before, for a bounded time. On a GPU
        this does not wait for the results.

        Returns:
            `done`: [digest, error or ""] of items that have ended; `left`: how many have not.
        """
        kept = set(keep)
        for digest in [digest for digest in self._encoded if digest not in kept]:
            del self._encoded[digest]
        self._begun += [_Begun(*item) for item in items]
        done = []
        began, at_start, threads = self._mark(), time.monotonic(), torch.get_num_threads()
        torch.set_num_threads(self._threads)  # a native program leaves torch one
        try:
            work = 0
            while self._begun and not self._pauses(work, time.monotonic() - at_start):
                one = self._begun[0]
                error = self._advance(one)
                work += math.prod(one.shape[:3])
                if error is not None:
                    self._begun.remove(one)
                    done.append([one.digest, error])
        finally:
            torch.set_num_threads(threads)
        seconds = self._elapsed(began, time.monotonic() - at_start)
        return {"done": done, "left": len(self._begun), "seconds": seconds}

    def _pauses(self, work: int, seconds: float) -> bool:
        """Return whether steps should run before encoding continues.

        Args:
            work: numbers of data, see `MediaItem.work`, times layers encoded since the last step.
        """
        assert self._tower is not None
        if self._device.type == "cpu":
            return seconds > _SECONDS_BETWEEN_STEPS
        return work > self._tower.num_layers * _PATCHES_BETWEEN_STEPS * self._tower.patch_numbers

    @torch.inference_mode()
    def _advance(self, one: _Begun) -> str | None:
        """Compute an item's next layer; at its end return the text of the error, or "". One that fails is not the
        others' fault."""
        assert self._tower is not None
        try:
            if one.encoding is None:
                data = np.frombuffer(one.data, dtype=one.dtype).reshape(tuple(one.shape))
                one.encoding = self._tower.encoding(upload(data.copy(), self._device), tuple(one.layout))
            next(one.encoding)
        except StopIteration as end:
            if end.value.shape[0] != one.count:
                return f"the tower makes {end.value.shape[0]} embeddings of it, and the prompt has {one.count} places"
            self._encoded[one.digest] = end.value
            return ""
        except Exception as exc:
            log.exception("an item of %s could not be encoded", list(one.shape))
            return str(exc) or type(exc).__name__
        return None

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _elapsed(self, began: Any, host_s: float) -> float:
        """Return the seconds of encodings that have ended: on a GPU, of earlier ones."""
        if began is None:
            return host_s
        self._timed.append((began, self._mark()))
        ended = [pair for pair in self._timed if pair[1].query()]
        self._timed = [pair for pair in self._timed if pair not in ended]
        return sum(float(first.elapsed_time(last)) for first, last in ended) / 1000

    def buffers(self, max_rows: int, max_tokens: int) -> Mapping[str, Tensor]:
        if not self._axes:
            return {}
        self._shifts = torch.zeros(max_tokens, 3, dtype=torch.int32, device=self._device)
        return {"axis_shifts": self._shifts}

    def add(self, slot: int, options: msgspec.Raw | None) -> None:
        self._after.pop(slot, None)

    def lay_out(self, plan: StepPlan, payload: MediaStep | None) -> None:
        """Write what images add to the positions of the step's tokens.

        Of the tokens after a prompt that is the same number for all. So only steps with parts of such prompts have a
        payload for it, and others can be replayed: recordings read the buffer.
        """
        if not self._axes:
            return
        for piece in () if payload is None else payload.shifts:
            self._after[piece.slot] = piece.after
        shifted = [self._after.get(slot, 0) for slot in plan.slots]
        self._shifted = any(shifted)
        if self._shifted or payload is not None:
            rows = np.repeat(np.asarray(shifted, dtype=np.int32), plan.num_tokens)
            shifts = np.repeat(rows[:, None], 3, axis=1)
            for piece in () if payload is None else payload.shifts:
                shifts[piece.start : piece.start + piece.count] = np.frombuffer(piece.shifts, np.int32).reshape(-1, 3)
            self._shifts[: len(shifts)] = upload(shifts, self._device)
            self._shifted = bool(shifts.any())
            self._used = max(self._used, len(shifts))
        elif self._used:
            self._shifts[: self._used].zero_()
            self._used = 0

    def additions(self, count: int, payload: MediaStep) -> Sequence[Tensor]:
        assert self._tower is not None
        found = [
            torch.zeros(count, self._hidden, dtype=self._tower.dtype, device=self._device)
            for _ in range(self._tower.additions if payload.pieces else 0)
        ]
        for i, added in enumerate(found, 1):
            self._write(added, payload, i)
        return found

    def inputs(self, num_tokens: int, payload: MediaStep) -> Mapping[str, Tensor]:
        if not self._mutual:
            return {}
        ahead = np.zeros(num_tokens, dtype=np.int32)
        for piece in payload.pieces:  # each goes to the end of its image
            ahead[piece.start : piece.start + piece.count] = np.arange(piece.count - 1, -1, -1)
        return {"ahead": upload(ahead, self._device)}

    def embed(self, x: Tensor, payload: MediaStep) -> None:
        self._write(x, payload, 0)

    def _write(self, x: Tensor, payload: MediaStep, part: int) -> None:
        """Write a part of the embeddings of a step's images to the rows of their tokens."""
        columns = slice(part * self._hidden, (part + 1) * self._hidden)
        for piece in payload.pieces:
            encoded = self._encoded.get(piece.digest)
            if encoded is None:  # a recorded step, which is computed again without the calls in between
                raise UnsupportedError(
                    "The images, frames or audio of this step are not encoded here, so it can't be computed."
                )
            rows = encoded[piece.first : piece.first + piece.count]
            x[piece.start : piece.start + piece.count] = rows[:, columns]


def memory_of(
    tower: Tower, settings: MediaSettings, longest: int, limits: tuple[int, int], of_videos: int
) -> tuple[int, Reserved]:
    """Return how many embeddings are kept, and the memory of a tower.

    Args:
        longest: tokens of the longest prompt; larger items are refused with it.
        limits: sequences at once, and tokens of a step, at most.
        of_videos: embeddings of the largest item of a video.
    """
    size = tower.hidden_size * tower.dtype.itemsize
    each, most = (1 + tower.additions) * size, min(max(tower.most, of_videos), longest)
    capacity = max(most, int(settings.mm_encoder_cache_gb * 2**30) // each)
    patches = tower.most_patches * most // tower.most
    workspace = tower.workspace_bytes(max(patches, _WORKSPACE_PATCHES))
    added = tower.additions * limits[1] * size
    return capacity, Reserved(weights=tower.nbytes, workspace=workspace + added + capacity * each)


class ShiftingWorker(MediaWorker):
    """On a CPU, the kernels that draw tokens, too, know one position of a token. Other kernels compute the steps of
    requests whose positions images have shifted, and torch draws."""

    def variant(self, payload: MediaStep | None) -> Hashable | None:
        return _SHIFTED if self._shifted else None


def build_worker(context: FeatureContext) -> MediaWorker | None:
    """Return None if only text of the model is read."""
    if context.files is None or all(refusals(context).values()):
        return None
    shifts = kind_of(context.files.config).axes and context.device == "cpu"
    make = ShiftingWorker if shifts else MediaWorker
    return make(context.files, context.settings_of(MediaSettings), context.load_tokenizer, most_of_videos(context))
