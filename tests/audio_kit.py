"""Tiny models of each kind with audio: a checkpoint on disk, and what Transformers makes of prompts with it."""

from __future__ import annotations

import base64
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import image_kit
import numpy as np
import torch
import transformers
from media_kit import TEXT, greedy, logits, save_tokenizer, saved
from numpy.typing import NDArray
from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor

RATE = 16_000
MARKS = [
    "<|AUDIO|>",
    "<|audio_bos|>",
    "<|audio_eos|>",
    "<sound>",
    "<|audio_start|>",
    "<|audio_pad|>",
    "<|audio_end|>",
]
_TEXT = {"vocab_size": 570, **TEXT}
_WHISPER = {"num_mel_bins": 16, "max_source_positions": 50, "initializer_range": 0.15}
_ENCODER = {
    "num_mel_bins": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "d_model": 32,
    "initializer_range": 0.15,
}


def tokenizer() -> Any:
    made = image_kit.tokenizer()
    made.add_special_tokens(MARKS)
    made.add_tokens(["<asr_text>"])
    return made


def token(text: str) -> int:
    return int(tokenizer().token_to_id(text))


@dataclass(frozen=True, eq=False)
class Case:
    """A kind of model.

    Attributes:
        name: beginning of the classes' names.
        place: what its template writes for a piece of audio.
        mark: the token among it that embeddings replace.
    """

    name: str
    place: str
    mark: str
    audio: dict[str, Any]
    text: dict[str, Any]
    whole: dict[str, Any]
    extractor: Any


def cases() -> dict[str, Case]:
    second = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    windows = {"n_window_infer": 200, "output_dim": 64, "downsample_hidden_size": 8}
    return {
        "qwen2-audio": Case(
            "Qwen2Audio",
            "<|audio_bos|><|AUDIO|><|audio_eos|>",
            "<|AUDIO|>",
            {**_ENCODER, **_WHISPER},
            {"model_type": "qwen2"},
            {"audio_token_index": token("<|AUDIO|>")},
            second,
        ),
        "audio-flamingo-3": Case(
            "AudioFlamingo3",
            "<sound>",
            "<sound>",
            {
                **_WHISPER,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
            },
            {"model_type": "qwen2"},
            {"audio_token_id": token("<sound>"), "projector_bias": False},
            second,
        ),
        "qwen3-asr": Case(
            "Qwen3ASR",
            "<|audio_start|><|audio_pad|><|audio_end|>",
            "<|audio_pad|>",
            {**_ENCODER, **windows, "initializer_range": 0.4},
            {"model_type": "qwen3", "head_dim": 16},
            {"audio_token_id": token("<|audio_pad|>"), "eos_token_id": 0, "pad_token_id": 0, "initializer_range": 0.3},
            Qwen3ASRFeatureExtractor(feature_size=16),
        ),
    }


@dataclass(frozen=True, eq=False)
class Made:
    """A checkpoint on disk, and the same model and processor in Transformers."""

    folder: Path
    case: Case
    model: Any
    processor: Any

    def prompt(self, text: str) -> str:
        return text.replace("AUDIO", self.case.place)

    def inputs(self, text: str, sounds: list[NDArray[np.float32]]) -> Any:
        return self.processor(text=[self.prompt(text)], audio=sounds, sampling_rate=RATE, return_tensors="pt")

    def generated(self, text: str, sounds: list[NDArray[np.float32]], count: int) -> tuple[list[int], list[int]]:
        """The prompt's tokens, and `count` greedy ones after them."""
        return greedy(self.model, self.inputs(text, sounds), count)

    def logits(self, text: str, sounds: list[NDArray[np.float32]]) -> torch.Tensor:
        """Of the token after the prompt."""
        return logits(self.model, self.inputs(text, sounds))


def processor(case: Case, own: Any) -> Any:
    """Transformers' own, which also takes several pieces of audio in one text."""
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=own, pad_token="<unk>")
    fast.audio_token, fast.audio_bos_token, fast.audio_eos_token = case.mark, *_around(case)
    theirs = getattr(transformers, f"{case.name}Processor")
    made = type(theirs.__name__, (theirs,), {"validate_inputs": lambda self, *args, **kwargs: None})
    more = {"max_audio_len": 4} if case.name == "AudioFlamingo3" else {}
    return made(case.extractor, fast, **more)


def _around(case: Case) -> tuple[str, str]:
    return ("<|audio_start|>", "<|audio_end|>") if case.name == "Qwen3ASR" else ("<|audio_bos|>", "<|audio_eos|>")


def make(name: str, folder: Path, seed: int = 7) -> Made:
    """Write a random checkpoint with tokenizer, template and preprocessor."""
    case = cases()[name]
    halves = {"audio_config": case.audio, "text_config": {**_TEXT, **case.text}, **case.whole}
    model = saved(case.name, halves, folder, seed)
    own = tokenizer()
    save_tokenizer(own, folder, "audio", case.place)
    made = processor(case, own)
    case.extractor.save_pretrained(folder)
    if name == "audio-flamingo-3":
        stated = {"feature_extractor": case.extractor.to_dict(), "max_audio_len": 4}
        (folder / "processor_config.json").write_text(json.dumps(stated))
    return Made(folder, case, model, made)


def sound(seconds: float, seed: int = 0, rate: int = RATE) -> NDArray[np.float32]:
    """Tones that change, and noise."""
    rng = np.random.default_rng(seed)
    times = np.arange(round(seconds * rate)) / rate
    tones = sum(np.sin(2 * np.pi * (200 * (i + 1 + seed) + 90 * times) * times + i) / (i + 2) for i in range(3))
    return (0.3 * tones + rng.normal(0, 0.02, len(times))).astype(np.float32)


def wav(samples: NDArray[np.float32], rate: int = RATE) -> bytes:
    """A file with samples of 32-bit floats, which loses nothing."""
    data = samples.astype("<f4").tobytes()
    channels = 1 if samples.ndim == 1 else samples.shape[1]
    form = struct.pack("<HHIIHH", 3, channels, rate, 4 * channels * rate, 4 * channels, 32)
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def data_url(samples: NDArray[np.float32], rate: int = RATE) -> str:
    return "data:audio/wav;base64," + base64.b64encode(wav(samples, rate)).decode()
