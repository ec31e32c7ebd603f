"""What all kinds of preprocessing share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import ConfigError, ModelFileError
from octavo.features.media.processors.resize import resize
from octavo.text.tokenizers.tokenizer import Tokenizer

Pixels = NDArray[np.uint8]
"""[height, width, 3], RGB."""
BILINEAR, BICUBIC, LANCZOS = 2, 3, 1
"""Pillow's numbers of filters, which checkpoints state."""
_MOST_EDGE = 32768
"""An image is resized to at most as many pixels per edge."""


class TooOddError(ValueError):
    """What the model can't take; the text completes a sentence that begins with its field."""


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """What is encoded at once.

    Attributes:
        data: as `MediaItem` has it.
        count: embeddings that it has.
        layout, times, group: see `MediaItem`.
    """

    data: NDArray[Any]
    count: int
    layout: tuple[int, ...] = ()
    times: tuple[int, ...] = ()
    group: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """Embeddings [first, first + count) of an item, which follow each other in the prompt."""

    item: Item
    first: int
    count: int


LoadTokenizer = Callable[[], Tokenizer]
"""Returns the model's tokenizer, which may take long the first time."""
NORMALIZING = frozenset(("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std"))
"""Fields that the tower reads."""

Piece = list[int] | str | Run
"""A part of what an image, a piece of audio or a video is in a prompt: tokens, placeholders, or text that is tokenized
together with the text beside it."""


class Processor(ABC):
    """Turns images or audio into pieces of a prompt. Stateless; may be used from any thread.

    Attributes:
        token: the token that a chat template writes for an image or a piece of audio.
        around: tokens before and after it, where a template knows only texts.
        frame: texts before and after it, which the model's own processor writes before it tokenizes a prompt.
        fields: of preprocessor_config.json that are read.
    """

    fields: ClassVar[frozenset[str]] = frozenset()
    token: int
    around: tuple[list[int], list[int]] = ([], [])

    @property
    def frame(self) -> tuple[str, str]:
        return "", ""

    @abstractmethod
    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any], tokenizer: LoadTokenizer) -> None:
        """
        Args:
            config: of the model.
            processor: see `MediaInfo`.

        Raises:
            ConfigError, ModelFileError: a field asks for something that is not supported, or is damaged.
        """

    @abstractmethod
    def pieces(self, given: Any, /, *, coarse: bool) -> Sequence[Piece]:
        """Return what replaces the token.

        Args:
            given: an image of Pillow in RGB, or `Samples` of one channel at 16 kHz.
            coarse: use the fewest embeddings that the model offers (`detail: "low"`); of images only.

        Raises:
            TooOddError: the model can't take it.
        """

    @property
    @abstractmethod
    def most(self) -> int:
        """Embeddings of the largest item."""


def resized(pixels: Pixels, height: int, width: int, resample: int) -> Pixels:
    """Resize with a filter of Pillow, which Transformers uses, too.

    Raises:
        TooOddError: it would become too large.
    """
    if max(height, width) > _MOST_EDGE:
        raise TooOddError(
            f"is {pixels.shape[1]} x {pixels.shape[0]} pixels, and would be resized to {width} x {height}; crop it"
        )
    return resize(pixels, height, width, resample)


def digits(config: Mapping[str, Any], name: str, default: int) -> int:
    """Return a field that is a positive whole number. Raise ModelFileError if it is not one."""
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelFileError(f"The model's preprocessor has {name}={value!r}, which should be a positive whole number.")
    return value


def edges(value: Any, name: str) -> dict[str, int]:
    """Return a size as an object of whole numbers: a number is both edges."""
    if isinstance(value, int) and not isinstance(value, bool):
        return {"height": value, "width": value}
    found = {key: one for key, one in value.items() if one is not None} if isinstance(value, Mapping) else {}
    if not found or any(isinstance(one, bool) or not isinstance(one, int) or one < 1 for one in found.values()):
        raise ModelFileError(f"The model's preprocessor has {name}={value!r}, which should be an object of pixels.")
    return found


def switch(config: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """Return a field that is true or false; null is false, as in Transformers."""
    return bool(config.get(name, default))


def one_token(tokenizer: LoadTokenizer, text: str) -> int:
    """Return the token of a text that must be one. Raise ConfigError if it is not."""
    found = tokenizer().encode(text, add_special_tokens=False)
    if len(found) != 1:
        raise ConfigError(
            f"The model's tokenizer has no token {text!r}, which images need. Get the tokenizer that belongs to the "
            "model."
        )
    return found[0]


def token_or_none(tokenizer: LoadTokenizer, text: str) -> int | None:
    """Return the token of a text; None if it is none, or several."""
    found = tokenizer().encode(text, add_special_tokens=False)
    return found[0] if len(found) == 1 else None


def edge(config: Mapping[str, Any], name: str, default: int) -> int:
    """Return a field of a vision_config that is an edge, or a list of two equal ones. Raise ModelFileError if not."""
    value = config.get(name, default)
    pair = value if isinstance(value, list | tuple) else [value, value]
    if len(pair) != 2 or pair[0] != pair[1]:
        raise ModelFileError(f"The model's vision_config has {name}={value!r}, which should be of a square.")
    return digits({name: pair[0]}, name, default)
