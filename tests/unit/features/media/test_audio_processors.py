"""Spectrograms and windows equal those of Transformers' feature extractors, and files that don't fit are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import transformers
from audio_kit import RATE, cases, sound, token, tokenizer
from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor

from octavo.core.errors import ConfigError, ModelFileError
from octavo.features.media.preprocessing import check_fields, make_processor
from octavo.features.media.processors.base import Item, Processor, Run, TooOddError
from octavo.features.media.processors.speech import convolved
from octavo.text.tokenizers.tokenizer import Tokenizer

WORDS = Tokenizer(tokenizer(), named_tokens={"bos_token": "<s>"})
WHISPER = {"num_mel_bins": 128, "max_source_positions": 1500}


def config_of(name: str, **audio: Any) -> dict[str, Any]:
    case = cases()[name]
    whole = {"architectures": [f"{case.name}ForConditionalGeneration"], **case.whole}
    return whole | {"audio_config": case.audio | audio}


def processor(name: str, stated: dict[str, Any] | None = None, **audio: Any) -> Processor:
    own = cases()[name].extractor.to_dict() if stated is None else stated
    return make_processor(config_of(name, **audio), own, lambda: WORDS)


def items(one: Processor, seconds: float) -> list[Item]:
    pieces = one.pieces(sound(seconds), coarse=False)
    assert all(isinstance(piece, Run) and piece.first == 0 for piece in pieces)
    return [piece.item for piece in pieces if isinstance(piece, Run)]


@pytest.mark.parametrize("seconds", [0.5, 7.003, 29.985, 29.999, 30.0])
def test_whispers_spectrogram(seconds: float) -> None:
    extractor = transformers.WhisperFeatureExtractor(feature_size=128)
    expected = extractor(sound(seconds), sampling_rate=RATE, return_attention_mask=True, return_tensors="np")
    (item,) = items(processor("qwen2-audio", extractor.to_dict(), **WHISPER), seconds)
    heard = int(expected["attention_mask"].sum())
    assert item.layout == (heard,)
    assert item.data.shape == (1, 128, min(3000, heard + 2))
    np.testing.assert_allclose(item.data[0], expected["input_features"][0, :, : heard + 2], atol=5e-5)


@pytest.mark.parametrize("seconds", [0.2, 0.5, 1.0, 8.0, 17.003])
def test_qwen3_asrs_spectrogram(seconds: float) -> None:
    extractor = Qwen3ASRFeatureExtractor()
    expected = extractor([sound(seconds)], sampling_rate=RATE, padding=True, return_attention_mask=True)
    found = items(processor("qwen3-asr", extractor.to_dict(), num_mel_bins=128, n_window_infer=800), seconds)
    assert sum(item.layout[0] for item in found) == int(expected["attention_mask"].sum())
    whole = np.concatenate([item.data.swapaxes(0, 1).reshape(128, -1) for item in found], axis=1)
    np.testing.assert_allclose(whole, expected["input_features"][0].numpy(), atol=5e-5)
    assert all(item.count <= 104 for item in found)


def test_embeddings_of_frames() -> None:
    assert [convolved(frames) for frames in (1, 8, 9, 100, 101, 800)] == [1, 1, 2, 13, 14, 104]
    assert [processor(name).most for name in cases()] == [25, 25, 26]


def test_tokens_around() -> None:
    assert processor("qwen2-audio").around == ([token("<|audio_bos|>")], [token("<|audio_eos|>")])
    assert processor("audio-flamingo-3").around == ([], [])
    assert processor("qwen3-asr").around == ([token("<|audio_start|>")], [token("<|audio_end|>")])


@pytest.mark.parametrize(("name", "most"), [("qwen2-audio", 1), ("audio-flamingo-3", 4)])
def test_what_would_be_cut_off_is_refused(name: str, most: int) -> None:
    one = processor(name, cases()[name].extractor.to_dict() | {"max_audio_len": 4})
    assert sum(item.count for item in items(one, most)) == 25 * most
    with pytest.raises(TooOddError, match=f"is {most}.1 seconds long, and the model takes {most}; split it"):
        one.pieces(sound(most + 0.1), coarse=False)


def test_too_few_samples() -> None:
    for name in ("qwen2-audio", "audio-flamingo-3"):
        with pytest.raises(TooOddError, match="has 20 ms of sound, too few"):
            processor(name).pieces(sound(0.02), coarse=False)
    assert items(processor("qwen3-asr"), 0.001)[0].count == 7


def test_a_rest_without_an_embedding_is_left_out() -> None:
    assert [item.count for item in items(processor("audio-flamingo-3"), 2.01)] == [25, 25]


@pytest.mark.parametrize(
    ("name", "stated", "audio", "says"),
    [
        ("qwen2-audio", {"feature_size": 80}, {}, "feature_size=80, and its audio_config num_mel_bins=16"),
        ("qwen2-audio", {"chunk_length": 30}, {}, "chunk_length=30, and its audio_config max_source_positions=50"),
        ("qwen2-audio", {"hop_length": 80}, {}, "hop_length=80; Octavo supports 160 only"),
        ("qwen3-asr", {"dither": 0.1}, {}, "dither=0.1; Octavo supports 0.0 only"),
        ("qwen3-asr", {}, {"n_window": 100}, "n_window=100; Octavo supports 50 only"),
        ("qwen3-asr", {}, {"n_window_infer": 150}, "n_window_infer=150; Octavo supports multiples of 100"),
        ("qwen3-asr", {"min_length": "x"}, {}, "min_length='x', which should be a positive whole number"),
    ],
)
def test_files_that_do_not_fit(name: str, stated: dict[str, Any], audio: dict[str, Any], says: str) -> None:
    with pytest.raises((ConfigError, ModelFileError)) as caught:
        processor(name, cases()[name].extractor.to_dict() | stated, **audio)
    assert says in str(caught.value)


def test_fields_in_place_of_the_preprocessors() -> None:
    check_fields(config_of("audio-flamingo-3"), {"max_audio_len": 60})
    with pytest.raises(ConfigError, match=r"'max_audio_len', which has no effect on this model. It takes none"):
        check_fields(config_of("qwen2-audio"), {"max_audio_len": 60})
