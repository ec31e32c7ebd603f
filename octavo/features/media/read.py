"""Read the images, videos or audio of a prompt, and lay out their placeholders among its tokens."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

from octavo.core.errors import InvalidRequestError, UnsupportedError, context_error
from octavo.core.info import ModelInfo
from octavo.core.params import SamplingParams
from octavo.core.request import PLACEHOLDER
from octavo.features.media.kinds import PLURALS
from octavo.features.media.parts import MODALITIES, VideoParts, opener
from octavo.features.media.payload import NAME, MediaInfo, MediaItem
from octavo.features.media.preprocessing import make_processor, make_video_processor
from octavo.features.media.processors.base import Item, Piece, Run, TooOddError
from octavo.features.media.video.video import Sampling
from octavo.text.hooks import ReadPrompt, encoded
from octavo.text.prompts.message_parts import GivenPart, Mixture
from octavo.text.prompts.prompt import Prompt
from octavo.text.tokenizers.literal import framed, joined, split_at
from octavo.text.tokenizers.tokenizer import Tokenizer

_PARAM = "multi_modal_data"
_SAMPLING = ("mm_processor_kwargs", "media_io_kwargs")
_KEYS = {"prompt", "prompt_token_ids", "cache_salt", "type", _PARAM, *_SAMPLING}

Element = int | GivenPart | Run
"""Of a prompt: a token, a part that is not read yet, or placeholders of one that is."""


class Reader:
    """Reads the prompts of one model. Stateless; may be used from any thread.

    Raises:
        ConfigError, ModelFileError: see `make_processor`.
    """

    def __init__(self, tokenizer: Tokenizer, info: ModelInfo, own: MediaInfo) -> None:
        self._tokenizer, self._info, self._own = tokenizer, info, own
        self._processor = make_processor(own.config, own.processor, lambda: tokenizer)
        self._opener = opener(own)
        video = own.video if own.video in own.read else None
        self._videos = None if video is None else make_video_processor(own.config, video.processor, lambda: tokenizer)
        self._video_parts = None if video is None else VideoParts(video)
        self._tokens = {self._processor.token: own.modality}
        if self._videos is not None and self._videos.token is not None:
            self._tokens[self._videos.token] = "video"
        self._some = " or ".join(PLURALS[one.modality] for one in own.read)

    @property
    def marks_are_text(self) -> bool:
        """Whether the mark of a video is no token."""
        return self._videos is not None and self._videos.token is None

    def read(self, prompt: Mapping[str, Any], params: SamplingParams, *, truncated: bool) -> ReadPrompt:
        """Read a prompt with `multi_modal_data`: a mixture of texts and parts, or an object with images, videos or
        audio.

        Raises:
            InvalidRequestError: it can't be served; the message names the part.
        """
        if truncated:
            raise UnsupportedError(
                f"truncate_prompt_tokens can't be combined with {self._some}; shorten the text instead.",
                param="truncate_prompt_tokens",
            )
        if params.prompt_logprobs is not None:
            raise UnsupportedError(
                f"prompt_logprobs can't be combined with {self._some}; leave one of them out.",
                param="prompt_logprobs",
                value=params.prompt_logprobs,
            )
        given = prompt[_PARAM]
        asked = (params.feature_args or {}).get(NAME) or {}
        sampling = Sampling.of(*(asked.get(name) or prompt.get(name) for name in _SAMPLING))
        if isinstance(given, Mixture):
            parts = [*(piece for piece in given.pieces if not isinstance(piece, str)), *given.shown]
            self._check(parts, sampling)
            elements = self._of_mixture(given, sampling)
        else:
            elements = self._of_object(prompt, given, sampling)
        return self._laid_out(prompt, elements, sampling, params.max_tokens or 1)

    # Where they are

    def _of_mixture(self, mixture: Mixture, sampling: Sampling) -> list[Element]:
        """Return the prompt, with each part in its place.

        A part in a place of its own gets the tokens that a template would write around it.
        """
        shown: dict[str, list[GivenPart]] = {}
        for part in mixture.shown:
            shown.setdefault(MODALITIES[part.kind], []).append(part)
        pieces: list[str | GivenPart] = []
        for piece in mixture.pieces:
            if isinstance(piece, str):
                pieces += self._split(self._framed(piece), shown.get("video", []))
            else:
                pieces.append(piece)
        elements = self._placed(self._elements(pieces, sampling, special=False), shown, "messages")
        left = next((part for parts in shown.values() for part in parts), None)
        if left is not None:
            raise InvalidRequestError(
                f"The chat template leaves {left.param} out of the prompt. Put it into another message.",
                param=left.param,
            )
        return elements

    def _split(self, text: str, videos: list[GivenPart]) -> list[str | GivenPart]:
        """Put videos whose pieces have texts in place of their marks, and take them from the list."""
        if self._videos is None or not self._videos.textual or not videos:
            return [text]
        first, *rest = split_at(text, self._videos.mark)
        pieces: list[str | GivenPart] = [first]
        for after in rest:
            if not videos:
                raise self._too_many_places(len(rest), "video", self._videos.mark, "messages")
            pieces += [videos.pop(0), after]
        return pieces

    def _elements(self, pieces: Sequence[str | GivenPart], sampling: Sampling, *, special: bool) -> list[Element]:
        """Tokenize the texts, each together with the texts beside it.

        Args:
            special: the first one with the tokenizer's marks.
        """
        elements: list[Element] = []
        texts: list[str] = []

        def tokenize() -> None:
            text = joined([text for text in texts if text])
            texts.clear()
            if text and elements:
                elements.extend(self._tokenizer.encode_after(text))
            elif text:
                elements.extend(self._tokenizer.encode(text, add_special_tokens=special))

        for piece in pieces:
            if isinstance(piece, str):
                texts.append(piece)
                continue
            video = self._videos if MODALITIES[piece.kind] == "video" else None
            if video is not None and video.textual:
                used = sum(one.count if isinstance(one, Run) else 1 for one in elements)
                for one in self._pieces(piece, sampling, self._info.max_model_len - 1 - used):
                    if isinstance(one, str):
                        texts.append(one)
                        continue
                    tokenize()
                    elements += one if isinstance(one, list) else [one]
                continue
            tokenize()
            before, after = self._processor.around if video is None else video.around
            elements += [*before, piece, *after]
        tokenize()
        return elements

    def _placed(self, elements: Sequence[Element], shown: Mapping[str, list[GivenPart]], param: str) -> list[Element]:
        """Put parts in place of their tokens, and take them from the lists."""
        places = Counter(self._tokens[one] for one in elements if isinstance(one, int) and one in self._tokens)
        for token, modality in self._tokens.items():
            if places[modality] > len(shown.get(modality, ())):
                raise self._too_many_places(places[modality], modality, self._tokenizer.token_text(token), param)
        return [
            shown[self._tokens[one]].pop(0) if isinstance(one, int) and one in self._tokens else one for one in elements
        ]

    def _too_many_places(self, count: int, modality: str, mark: str, param: str) -> InvalidRequestError:
        some = PLURALS[modality]
        return InvalidRequestError(
            f"The prompt has {count} places of {some}, more than it has {some}. Leave {mark!r} out of the messages.",
            param=param,
        )

    def _of_object(self, prompt: Mapping[str, Any], given: Any, sampling: Sampling) -> list[Element]:
        odd = next((name for name, value in prompt.items() if name not in _KEYS and value not in (None, {})), None)
        if odd is not None:
            raise UnsupportedError(
                f"A prompt with {_PARAM} has 'prompt' or 'prompt_token_ids', and perhaps 'cache_salt' and "
                f"'mm_processor_kwargs'; {odd!r} is not supported, leave it out.",
                param=odd,
            )
        parts = self._listed(given)
        self._check([part for some in parts.values() for part in some], sampling)
        tokens, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
        if tokens is not None:
            if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
                raise InvalidRequestError("prompt_token_ids must be a list of integers.", param="prompt_token_ids")
            elements: list[Element] = [one for token in tokens for one in self._around(token)]
        elif not isinstance(text, str):
            raise InvalidRequestError("A prompt must have 'prompt' or 'prompt_token_ids'.", param="prompt")
        else:
            videos = parts.get("video", [])
            text = self._framed(text)
            if self._videos is not None and self._videos.textual and videos:
                self._check_places(len(split_at(text, self._videos.mark)) - 1, "video", self._videos.mark, videos)
            elements = self._elements(self._split(text, videos), sampling, special=True)
        for token, modality in self._tokens.items():
            some = parts.get(modality, [])
            self._check_places(elements.count(token), modality, self._tokenizer.token_text(token), some)
        placed = self._placed(elements, parts, _PARAM)
        left = next((part for some in parts.values() for part in some), None)
        if left is not None:  # videos without a token, in a prompt of tokens
            raise InvalidRequestError(
                f"{left.param} has no place among tokens: give the prompt as text, with the model's mark of a video.",
                param="prompt_token_ids",
            )
        return placed

    def _listed(self, given: Any) -> dict[str, list[GivenPart]]:
        """Return what `multi_modal_data` has of each modality."""
        if not isinstance(given, Mapping):
            raise InvalidRequestError(
                f'{_PARAM} must be an object such as {{"{self._own.modality}": ...}}, got {type(given).__name__}.',
                param=_PARAM,
            )
        read = [one.modality for one in self._own.read]
        odd = next((name for name, value in given.items() if name not in read and not _is_empty(value)), None)
        if odd is not None:
            known = self._own.of(odd)
            why = f"this model reads {self._some} only" if known is None else f"it can't be read: {known.refused}"
            raise UnsupportedError(f"{_PARAM} has {odd!r}; {why}. Leave it out.", param=f"{_PARAM}.{odd}")
        found: dict[str, list[GivenPart]] = {}
        for own in read:
            listing = self._video_parts if own == "video" else self._opener
            some = given.get(own)
            assert listing is not None
            found[own] = [
                GivenPart(f"{_PARAM}.{own}.{number}", own, one, {"type": own, own: one})
                for number, one in enumerate([] if _is_empty(some) else listing.listed(some))
            ]
        return found

    def _check_places(self, places: int, modality: str, mark: str, parts: Sequence[GivenPart]) -> None:
        if places != len(parts):
            raise InvalidRequestError(
                f"The prompt has {places} places of {PLURALS[modality]} ({mark!r}), and {_PARAM} has {len(parts)}. "
                f"Write {mark!r} where each belongs.",
                param=_PARAM,
                value=len(parts),
            )

    def _around(self, token: int) -> list[int]:
        """Return a token of a given prompt, with those that the model's own processor would write around it."""
        if token != self._processor.token or not any(self._processor.frame):
            return [token]
        before, after = self._processor.around
        return [*before, token, *after]

    def _framed(self, text: str) -> str:
        before, after = self._processor.frame
        if not before and not after:
            return text
        return framed(text, self._tokenizer.token_text(self._processor.token), before, after)

    def _check(self, parts: Sequence[GivenPart], sampling: Sampling) -> None:
        """Raise InvalidRequestError if there are too many parts, or the sampling has no effect."""
        for own in self._own.read:
            some = [part for part in parts if MODALITIES[part.kind] == own.modality]
            if len(some) > own.limit:
                raise InvalidRequestError(
                    f"At most {own.limit} {own.modality}(s) may be provided in one prompt (--limit-mm-per-prompt), "
                    f"got {len(some)}.",
                    param=some[0].param,
                    value=len(some),
                )
        if sampling == Sampling(param=sampling.param):
            return
        if not any(MODALITIES[part.kind] == "video" for part in parts):
            raise UnsupportedError(
                f"{sampling.param} has no effect: the prompt has no video. Leave it out.", param=sampling.param
            )
        assert self._videos is not None
        self._videos.check(sampling)

    # What they are

    def _laid_out(
        self, prompt: Mapping[str, Any], elements: Sequence[Element], sampling: Sampling, max_tokens: int
    ) -> ReadPrompt:
        """Return the prompt with each part replaced by what it is."""
        layout = _Layout()
        for one in elements:
            if isinstance(one, int):
                layout.add([one])
                continue
            if isinstance(one, Run):
                layout.place(one)
                continue
            room = self._info.max_model_len - 1 - len(layout.tokens)
            for piece in self._pieces(one, sampling, room):
                if isinstance(piece, Run):
                    layout.place(piece)
                else:
                    layout.add(self._tokenizer.encode_after(piece) if isinstance(piece, str) else piece)
            if len(layout.tokens) >= self._info.max_model_len:
                raise InvalidRequestError(
                    context_error(self._info.max_model_len, f"at least {len(layout.tokens)}", field="prompt"),
                    param=one.param,
                )
        option = layout.items()
        self._check_positions(option, len(layout.tokens), max_tokens)
        text, salt = prompt.get("prompt"), prompt.get("cache_salt")
        ids = {"prompt_token_ids": layout.tokens, "prompt": text, "cache_salt": salt}
        return ReadPrompt(cast("Prompt", ids), layout.keys, encoded(option, _PARAM))

    def _check_positions(self, items: Sequence[MediaItem], count: int, max_tokens: int) -> None:
        """Raise InvalidRequestError if times of videos are positions that the model does not have."""
        if not any(item.times for item in items):
            return
        from octavo.features.media.positions import Positions

        after, limit = Positions.of(items, count).after, self._info.max_model_len
        if after > 0 and count + after + max_tokens > limit:
            raise InvalidRequestError(
                f"The prompt and its answer need {count + after + max_tokens:,} positions, since times of videos are "
                f"positions, and the context has {limit:,}. Send a shorter video, or use more frames per second.",
                param=_PARAM,
            )

    def _pieces(self, part: GivenPart, sampling: Sampling, room: int) -> Sequence[Piece]:
        try:
            if MODALITIES[part.kind] == "video":
                assert self._videos is not None
                assert self._video_parts is not None
                return self._videos.pieces(self._video_parts.open(part, sampling.fps), sampling, room)
            given, coarse = self._opener.open(part)
            return self._processor.pieces(given, coarse=coarse)
        except TooOddError as exc:
            raise InvalidRequestError(f"{part.param} {exc}.", param=part.param) from None


class _Layout:
    """A prompt as it becomes: tokens with placeholders, their keys, and what the placeholders stand for."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.keys: list[int | bytes] = []
        self._items: dict[int, tuple[Item, bytes, list[tuple[int, int, int]]]] = {}

    def add(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.keys += tokens

    def place(self, run: Run) -> None:
        item = run.item
        _, digest, runs = self._items.setdefault(id(item), (item, _digest(item), []))
        runs.append((len(self.tokens), run.first, run.count))
        self.tokens += [PLACEHOLDER] * run.count
        each = item.count // len(item.times) if item.times else item.count
        times = [item.group.to_bytes(4, "little") + time.to_bytes(4, "little") for time in item.times] or [b""]
        self.keys += [
            digest + i.to_bytes(4, "little") + times[i // each if item.times else 0]
            for i in range(run.first, run.first + run.count)
        ]

    def items(self) -> list[MediaItem]:
        return [
            MediaItem(
                digest,
                item.data.shape,
                item.layout,
                item.count,
                runs,
                memoryview(item.data.tobytes()),
                item.data.dtype.str,
                item.times,
                item.group,
            )
            for item, digest, runs in self._items.values()
        ]


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, list | tuple) and not value)


def _digest(item: Item) -> bytes:
    """Return a digest of an item's data and shape."""
    form = item.data.dtype.str, item.data.shape, item.layout
    made = hashlib.blake2b(repr(form).encode(), digest_size=24)
    made.update(item.data.data if item.data.flags.c_contiguous else item.data.tobytes())
    return made.digest()
