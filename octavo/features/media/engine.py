"""`MediaEngine`: the engine half. It has images, frames and audio encoded before requests compute their tokens, and
tells the worker half which of them a step needs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.core.errors import ConfigError, EngineStateError, InvalidRequestError
from octavo.core.plan import PlanDraft
from octavo.core.request import GenerateRequest
from octavo.core.stats import FeatureMetric
from octavo.features import FeatureContext
from octavo.features.media.kinds import PLURALS, has_media, kind_of
from octavo.features.media.payload import NAME, EmbedPiece, MediaInfo, MediaItem, MediaStep, ShiftPiece
from octavo.features.media.preprocessing import info_of, refusals
from octavo.features.media.settings import MediaSettings
from octavo.schedule.hooks import EngineHook
from octavo.schedule.pages import Pages
from octavo.schedule.request import Request

if TYPE_CHECKING:
    from octavo.features.media.positions import Positions


log = logging.getLogger(__name__)

_ENCODED = {
    "image": ("images_encoded", "counter", "Images, tiles of them, or frames of videos, encoded."),
    "audio": ("audio_windows_encoded", "counter", "Windows of audio encoded."),
}


@dataclass(slots=True, eq=False)
class _Media:
    """The images, videos or audio of a request.

    Attributes:
        positions: what they add to positions; None for models whose positions are those of a text.
        seen: digests of those that were already counted as looked up.
        error: why one of them can't be encoded.
    """

    items: list[MediaItem]
    positions: Positions | None
    seen: set[bytes] = field(default_factory=set)
    error: str = ""

    def among(self, first: int, end: int) -> list[MediaItem]:
        """Return the items with placeholders at positions [first, end), in their order."""
        return [item for item in self.items if item.start < end and first < item.end]


class NoMedia(EngineHook):
    """For models that are served for text only: it says why."""

    name = NAME
    opt_in = True
    admits_for_good = True

    def __init__(self, info: MediaInfo) -> None:
        self.info = msgspec.Raw(msgspec.msgpack.encode(info))

    def namespace(self, spec: Any) -> str:
        raise InvalidRequestError("This engine reads only text.", param="multi_modal_data")


class MediaEngine(EngineHook):
    """Encodes before it admits: a request computes up to the first image, or window of audio, that is not encoded.

    What is encoded stays on the device, up to a number of embeddings; the least recently used is dropped first. What a
    request needs next is never dropped for one that comes after it; running requests come first, so that those that
    hold KV blocks always go on. The worker half computes some layers between two steps, so that others' tokens wait for
    no more than these.
    """

    name = NAME
    opt_in = True
    sends_options = False
    admits_for_good = True

    def __init__(self, info: MediaInfo, *, axes: bool = False, mutual: bool = False) -> None:
        """
        Args:
            axes, mutual: see `Kind`.
        """
        self.info = msgspec.Raw(msgspec.msgpack.encode(info))
        self._modality, self._some = info.modality, " or ".join(PLURALS[one.modality] for one in info.read)
        self._axes, self._mutual = axes, mutual
        self._pages: Pages
        self._capacity = self._budget = 0
        self._requests: dict[Request, _Media] = {}
        self._asked: dict[Request, list[MediaItem]] = {}
        """What requests need in the next plan, or needed in the last one."""
        self._waiting: set[Request] = set()
        self._encoded: dict[bytes, int] = {}
        """Digest -> embeddings; the least recently used first."""
        self._under_way: dict[bytes, MediaItem] = {}
        self._ended: dict[bytes, list[str]] = {}
        """Digest -> errors, or "", of the ranks that have encoded it."""
        self._pending: Future[list[Any]] | None = None
        self._decode = msgspec.msgpack.Decoder(list[MediaItem]).decode
        self._num_encoded = self._num_looked_up = self._num_found = 0
        self._seconds = 0.0

    def attach(self, pages: Pages) -> None:
        self._pages = pages
        facts = pages.call("describe", {}).result()[0]
        self._capacity, self._budget = facts["capacity"], facts["budget"]

    # Requests

    def unbroken(self, spec: GenerateRequest) -> Sequence[tuple[int, int]]:
        items = self._decode(spec.options[self.name]) if self._mutual else []
        return [(start, start + count) for item in items for start, _, count in item.runs]

    def on_add(self, request: Request) -> None:
        items = self._decode(request.spec.options[self.name])
        positions = None
        if self._axes:
            from octavo.features.media.positions import Positions  # imported here: it needs NumPy

            positions = Positions.of(items, request.num_prompt)
        self._requests[request] = _Media(items, positions)

    def on_release(self, request: Request) -> None:
        self._requests.pop(request, None)
        self._asked.pop(request, None)
        self._waiting.discard(request)

    def admit(self, request: Request, num_tokens: int) -> int:
        media = self._requests.get(request)
        if media is None:
            return num_tokens
        if media.error:
            raise EngineStateError(f"Some {self._some} could not be encoded: {media.error}")
        first = request.num_computed
        needed, end = self._fitting(media, first, first + num_tokens)
        self._waiting.discard(request)
        if not needed:
            return num_tokens
        self._asked[request] = needed
        self._count(media, needed)
        if any(item.digest not in self._encoded for item in needed):
            self._waiting.add(request)
            return 0
        return end - first

    def _fitting(self, media: _Media, first: int, end: int) -> tuple[list[MediaItem], int]:
        """Return the items that tokens [first, end) need, and a smaller end if they would not fit together."""
        needed: list[MediaItem] = []
        sizes: dict[bytes, int] = {}
        for item in media.among(first, end):
            sizes[item.digest] = item.count
            if needed and sum(sizes.values()) > self._capacity:
                return needed, item.start
            needed.append(item)
        return needed, end

    def _count(self, media: _Media, needed: Sequence[MediaItem]) -> None:
        for item in needed:
            if item.digest not in media.seen:
                media.seen.add(item.digest)
                self._num_looked_up += 1
                self._num_found += item.digest in self._encoded

    def waits_for(self, request: Request) -> str:
        return f"{self._some} to be encoded" if request in self._waiting else ""

    # Encoding

    @property
    def awaits(self) -> bool:
        return self._pending is not None or bool(self._under_way) or bool(self._waiting)

    def turn(self) -> None:
        self._take_in()
        asked, self._asked = self._asked, {}  # those that still wait ask again in the next plan
        if self._pending is None and self._pages.awake:
            if self._under_way:
                kept = [*self._encoded, *self._ended]  # the latter are not encoded on all ranks yet
                self._pending = self._pages.call("encode", {"keep": kept, "items": []})
            elif asked:
                self._encode(asked)
            self._take_in()

    def _encode(self, asked: Mapping[Request, Sequence[MediaItem]]) -> None:
        """Begin to encode what requests of the last plan lack."""
        kept: dict[bytes, int] = {}
        lacking: list[MediaItem] = []
        for request, needed in sorted(asked.items(), key=lambda one: one[0].slot < 0):
            media = self._requests.get(request)
            sizes = {item.digest: item.count for item in needed}
            if media is None or sum((kept | sizes).values()) > self._capacity:
                continue
            lacking += [item for item in needed if item.digest not in self._encoded and item.digest not in kept]
            kept |= sizes
        lacking = list({item.digest: item for item in lacking}.values())
        for digest in kept:
            if (size := self._encoded.pop(digest, None)) is not None:
                self._encoded[digest] = size  # now the most recently used
        if not lacking:
            return
        chosen: list[MediaItem] = []
        patches = 0
        for item in lacking:
            patches += item.work
            if chosen and patches > self._budget:
                break
            chosen.append(item)
        self._make_room(sum(item.count for item in chosen), kept)
        args = {
            "keep": list(self._encoded),
            "items": [[item.digest, item.shape, item.layout, item.count, item.data, item.dtype] for item in chosen],
        }
        self._under_way = {item.digest: item for item in chosen}
        self._pending = self._pages.call("encode", args)

    def _make_room(self, size: int, kept: Mapping[bytes, int]) -> None:
        used = sum(self._encoded.values())
        for digest in [digest for digest in self._encoded if digest not in kept]:
            if used + size <= self._capacity:
                return
            used -= self._encoded.pop(digest)

    def _take_in(self) -> None:
        """Take in what was encoded, if the worker half has answered."""
        if self._pending is None or not self._pending.done():
            return
        future, self._pending = self._pending, None
        failure = future.exception()
        if failure is not None:
            for item in self._under_way.values():
                self._failed(item, str(failure))
            self._under_way.clear()
            return
        ranks = future.result()
        self._seconds += max(rank["seconds"] for rank in ranks)
        for rank in ranks:
            for digest, error in rank["done"]:
                self._ended.setdefault(digest, []).append(error)
        for digest in [digest for digest, errors in self._ended.items() if len(errors) == len(ranks)]:
            error = next((one for one in self._ended.pop(digest) if one), "")
            ended = self._under_way.pop(digest, None)
            if ended is None:
                continue
            if error:
                self._failed(ended, error)
                continue
            self._encoded[digest] = ended.count
            self._num_encoded += 1
        if not any(rank["left"] for rank in ranks):  # after a sleep, none of what was under way is left
            self._under_way.clear()
            self._ended.clear()

    def _failed(self, item: MediaItem, error: str) -> None:
        for media in self._requests.values():
            if any(item.digest == own.digest for own in media.items):
                media.error = media.error or error

    def on_park(self) -> None:
        self._forget()

    def on_failure(self) -> None:
        self._asked.clear()

    def on_reset(self) -> None:
        self._forget()

    def on_weights(self) -> None:
        self._forget()

    def _forget(self) -> None:
        """Encode again what is needed from now on; the worker half drops the rest at the next call."""
        self._encoded.clear()
        self._asked.clear()

    def metrics(self) -> Sequence[FeatureMetric]:
        kept = sum(self._encoded.values())
        found = (
            (*_ENCODED[self._modality], self._num_encoded),
            (f"{self._modality}_encode_seconds", "counter", f"Seconds of encoding {self._some}.", self._seconds),
            (
                "mm_cache_queries",
                "counter",
                "Images, tiles, frames or windows that requests needed.",
                self._num_looked_up,
            ),
            ("mm_cache_hits", "counter", "Of these, those that were encoded already.", self._num_found),
            ("mm_cache_tokens", "gauge", "Embeddings of encoded images, frames or audio that are kept.", kept),
        )
        return [FeatureMetric(name, kind, text, "", {"": float(value)}) for name, kind, text, value in found]

    # Steps

    def on_plan(self, draft: PlanDraft, rows: Sequence[Request]) -> None:
        if not self._requests:
            return
        step = MediaStep([])
        used = False
        start = 0
        for request, count in zip(rows, draft.num_tokens, strict=True):
            first = request.num_computed - count  # num_computed includes this step
            media = self._requests.get(request)
            if media is not None and first < request.num_prompt:
                used |= self._add(step, media, request, first, count, start)
            start += count
        if used:
            draft.payload[self.name] = step

    def _add(self, step: MediaStep, media: _Media, request: Request, first: int, count: int, start: int) -> bool:
        """Add what the tokens at positions [first, first + count) need; return whether that is anything."""
        end, before = first + count, len(step.pieces)
        for item in media.among(first, end):
            for at, embedding, length in item.runs:
                low, high = max(first, at), min(end, at + length)
                if low < high:
                    step.pieces.append(EmbedPiece(item.digest, low - first + start, embedding + low - at, high - low))
        if media.positions is None:
            return len(step.pieces) > before
        positions = media.positions
        step.shifts.append(ShiftPiece(start, request.slot, positions.after, count, positions.between(first, end)))
        return True


def build_engine(context: FeatureContext) -> EngineHook | None:
    """Return None for models of text.

    Raises:
        ConfigError: a setting has no effect on the model.
    """
    files, settings = context.files, context.settings_of(MediaSettings)
    if files is None or not has_media(files.config):
        if settings.mm_processor_kwargs:
            raise ConfigError("--mm-processor-kwargs has no effect: this model takes only text. Leave it out.")
        return None
    why = refusals(context)
    info = info_of(context, why)
    if all(why.values()):
        first = next(iter(why.values()))
        if settings.mm_processor_kwargs:
            raise ConfigError(f"--mm-processor-kwargs has no effect: {first}. Leave it out.")
        if context.generates and any(settings.limit_of(modality) for modality in why):
            log.warning("the model is served for text only: %s", first)
        return NoMedia(info)
    if (no_videos := why.get("video")) and settings.limit_of("video"):
        log.warning("videos are not read: %s", no_videos)
    kind = kind_of(files.config)
    return MediaEngine(info, axes=kind.axes, mutual=kind.mutual)
