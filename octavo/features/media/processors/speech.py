"""Audio as log-mel spectrograms in windows: Whisper's encoder (https://arxiv.org/abs/2212.04356) in Qwen2-Audio
(https://arxiv.org/abs/2407.10759) and Audio Flamingo 3 (https://arxiv.org/abs/2507.08128), and Qwen3-ASR
(https://arxiv.org/abs/2601.21337)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from octavo.core.errors import ConfigError
from octavo.features.media.audio.mel import HOP, RATE, WINDOW, log_mel
from octavo.features.media.audio.resample import Samples
from octavo.features.media.processors.base import (
    Item,
    LoadTokenizer,
    Piece,
    Processor,
    Run,
    TooOddError,
    digits,
    one_token,
)

_SETTLED = {
    "hop_length": HOP,
    "n_fft": WINDOW,
    "sampling_rate": RATE,
    "padding_value": 0.0,
    "padding_side": "right",
    "dither": 0.0,
    "do_normalize": False,
}
"""Fields of preprocessor_config.json that have one value."""
CHUNK = 100
"""Frames that Qwen3-ASR's convolutions read together."""


class SpeechProcessor(Processor):
    """What the kinds of spectrograms share. Each window of a piece of audio is an item; they follow each other.

    An item's data: [n, mel bins, frames] float32. Its layout: the frames that have sound.
    """

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any], tokenizer: LoadTokenizer) -> None:
        audio = config["audio_config"]
        self._bins = digits(audio, "num_mel_bins", 128)
        if (own := digits(processor, "feature_size", self._bins)) != self._bins:
            raise ConfigError(
                f"The model's preprocessor has feature_size={own}, and its audio_config num_mel_bins={self._bins}. Get "
                "the files that belong together."
            )
        for name, only in _SETTLED.items():
            if (value := processor.get(name, only)) != only and value is not None:
                raise ConfigError(f"The model's preprocessor has {name}={value!r}; Octavo supports {only!r} only.")

    def pieces(self, given: Samples, *, coarse: bool) -> Sequence[Piece]:
        """Return a run for each window of the samples, which are one channel at 16 kHz."""
        items = [item for item in self._items(given) if item.count]
        if not items:
            raise TooOddError(
                f"has {len(given) / RATE * 1000:.0f} ms of sound, too few for the model; send a longer one"
            )
        return [Run(item, 0, item.count) for item in items]

    @abstractmethod
    def _items(self, samples: Samples) -> Iterator[Item]:
        """Yield the windows. Those that are too short for an embedding have none."""


class WhisperProcessor(SpeechProcessor):
    """One window of 30 seconds, with an embedding for every four frames.

    Frames after the sound are left out, except for two that the convolutions read with the last one.
    """

    marks: tuple[str, ...] = ("<|audio_bos|>", "<|audio_eos|>")

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any], tokenizer: LoadTokenizer) -> None:
        super().__init__(config, processor, tokenizer)
        self._seconds = digits(processor, "chunk_length", 30)
        self._frames = self._seconds * RATE // HOP
        positions = digits(config["audio_config"], "max_source_positions", 1500)
        if self._frames != 2 * positions:
            raise ConfigError(
                f"The model's preprocessor has chunk_length={self._seconds}, and its audio_config "
                f"max_source_positions={positions}, which should be {self._frames // 2}. Get the files that belong "
                "together."
            )
        self._most_windows = 1
        self.token = int(config.get("audio_token_index") or config.get("audio_token_id") or 151646)
        if self.marks:
            first, last = (one_token(tokenizer, mark) for mark in self.marks)
            self.around = [first], [last]

    @property
    def most(self) -> int:
        return _pooled(self._frames)

    def _items(self, samples: Samples) -> Iterator[Item]:
        size = self._seconds * RATE
        if len(samples) > self._most_windows * size:
            raise TooOddError(
                f"is {len(samples) / RATE:.1f} seconds long, and the model takes {self._most_windows * self._seconds}; "
                "split it"
            )
        for start in range(0, len(samples), size):
            yield self._item(samples[start : start + size])

    def _item(self, samples: Samples) -> Item:
        heard = -(-len(samples) // HOP)
        kept = min(self._frames, heard + 2)
        length = self._seconds * RATE if kept == self._frames else kept * HOP + WINDOW
        padded = np.zeros(length, dtype=np.float32)
        padded[: len(samples)] = samples
        return Item(log_mel(padded, self._bins, kept)[None], _pooled(heard), (heard,))


class FlamingoProcessor(WhisperProcessor):
    """Several of these windows, one after the other."""

    fields = frozenset(("max_audio_len",))
    marks = ()

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any], tokenizer: LoadTokenizer) -> None:
        super().__init__(config, processor, tokenizer)
        self._most_windows = max(1, digits(processor, "max_audio_len", 600) // self._seconds)
        self.token = int(config.get("audio_token_id") or 151669)


class QwenAsrProcessor(SpeechProcessor):
    """Windows of some chunks of a second, each with 13 embeddings, and fewer for the rest.

    The encoder attends within a window, so that each can be encoded by itself; the range of the spectrogram's values
    is that of the whole.
    """

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any], tokenizer: LoadTokenizer) -> None:
        super().__init__(config, processor, tokenizer)
        audio = config["audio_config"]
        if (half := digits(audio, "n_window", 50)) * 2 != CHUNK:
            raise ConfigError(f"The model's audio_config has n_window={half}; Octavo supports {CHUNK // 2} only.")
        self._window = digits(audio, "n_window_infer", 800)
        if self._window % CHUNK:
            raise ConfigError(
                f"The model's audio_config has n_window_infer={self._window}; Octavo supports multiples of {CHUNK}."
            )
        # The shortest that the convolutions and the original's preprocessing know.
        self._least = digits(processor, "min_length", 8000)
        self.token = int(config.get("audio_token_id") or 151676)
        first, last = (one_token(tokenizer, mark) for mark in ("<|audio_start|>", "<|audio_end|>"))
        self.around = [first], [last]

    @property
    def most(self) -> int:
        return convolved(self._window)

    def _items(self, samples: Samples) -> Iterator[Item]:
        padded = np.pad(samples, (0, max(0, self._least - len(samples))))
        frames = len(padded) // HOP
        whole = log_mel(padded, self._bins, frames)
        for start in range(0, frames, self._window):
            part = whole[:, start : start + self._window]
            heard = part.shape[1]
            chunks = -(-heard // CHUNK)
            part = np.pad(part, ((0, 0), (0, chunks * CHUNK - heard)))
            data = np.ascontiguousarray(part.reshape(self._bins, chunks, CHUNK).swapaxes(0, 1))
            yield Item(data, convolved(heard), (heard,))


def _pooled(frames: int) -> int:
    """Return the embeddings of frames: a convolution halves them, and pairs of states are averaged."""
    return ((frames - 1) // 2 + 1) // 2


def convolved(frames: int) -> int:
    """Return the embeddings of frames: in each chunk, three convolutions halve them."""
    rest = frames % CHUNK
    return frames // CHUNK * _eighth(CHUNK) + (_eighth(rest) if rest else 0)


def _eighth(frames: int) -> int:
    for _ in range(3):
        frames = (frames - 1) // 2 + 1
    return frames
