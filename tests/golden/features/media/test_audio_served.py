"""When a model's audio is read, and what happens if it can't be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from audio_kit import RATE, Made, make, sound

from octavo import LLM, SamplingParams
from octavo.core.errors import ConfigError, InvalidRequestError, ModelFileError
from octavo.features.media.towers.qwen3_asr import QwenAsrTower

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SETTINGS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 4 << 20, "threads": 1, "max_model_len": 256}
SOUND = sound(2.3)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make("qwen3-asr", tmp_path_factory.mktemp("qwen3-asr"))


@pytest.fixture(scope="module")
def expected(made: Made) -> list[int]:
    return made.generated("hear AUDIO?", [SOUND], 6)[1]


def asked(made: Made, samples: Any = SOUND) -> Any:
    return {"prompt": made.prompt("hear AUDIO?"), "multi_modal_data": {"audio": (samples, RATE)}}


def tokens(llm: LLM, prompt: Any) -> list[int]:
    return list(llm.generate(prompt, GREEDY)[0].outputs[0].token_ids)


def refusal(llm: LLM, prompt: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate(prompt, GREEDY)
    return str(caught.value)


def test_the_published_form(made: Made, expected: list[int], tmp_path: Path) -> None:
    """Original checkpoints of Qwen3-ASR have the halves' configurations in another one, and other names of tensors."""
    folder = Path(shutil.copytree(made.folder, tmp_path / "copy"))
    config = json.loads((folder / "config.json").read_text())
    audio = config.pop("audio_config") | {"model_type": "qwen3_asr_audio_encoder", "conv_chunksize": 500}
    text = config.pop("text_config")
    axes = {"mrope_section": [3, 3, 2], "mrope_interleaved": True, "rope_type": "default"}
    theta = text.pop("rope_parameters")["rope_theta"]
    text |= {"rope_scaling": axes, "rope_theta": theta, "tie_word_embeddings": True, "model_type": "qwen3"}
    thinker = {"audio_config": audio, "text_config": text, "audio_token_id": config.pop("audio_token_id")}
    kept = {"architectures": config["architectures"], "model_type": "qwen3_asr", "support_languages": ["English"]}
    (folder / "config.json").write_text(json.dumps(kept | {"thinker_config": thinker}))
    stated = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 16, "chunk_length": 30}
    (folder / "preprocessor_config.json").write_text(json.dumps(stated))
    path = folder / "model.safetensors"
    starts = {
        "model.audio_tower.": "thinker.audio_tower.",
        "model.multi_modal_projector.linear_": "thinker.audio_tower.proj",
        "model.language_model.": "thinker.model.",
    }
    renamed = {}
    for name, tensor in safetensors.torch.load_file(path).items():
        start = next(start for start in starts if name.startswith(start))
        renamed[starts[start] + name.removeprefix(start)] = tensor
    renamed["thinker.lm_head.weight"] = renamed["thinker.model.embed_tokens.weight"].clone()
    safetensors.torch.save_file(renamed, path)
    with LLM(str(folder), **SETTINGS) as llm:
        assert tokens(llm, asked(made)) == expected


def test_without_audio_the_tower_is_not_loaded(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    def unused(*args: Any) -> None:
        raise AssertionError("a tower")

    monkeypatch.setattr(QwenAsrTower, "__init__", unused)
    with LLM(str(made.folder), **SETTINGS, limit_mm_per_prompt={"audio": 0}) as llm:
        assert len(tokens(llm, "hear?")) == 6
        assert "--limit-mm-per-prompt audio=0" in refusal(llm, asked(made))


def test_files_that_are_missing(made: Made, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made.folder, tmp_path / "copy"))
    path = folder / "model.safetensors"
    kept = {name: one for name, one in safetensors.torch.load_file(path).items() if "audio_tower" not in name}
    safetensors.torch.save_file(kept, path)
    with pytest.raises(
        ModelFileError, match=r"needs tensor .*, which .* lacks.*--limit-mm-per-prompt '{\"audio\": 0}'"
    ):
        LLM(str(folder), **SETTINGS)
    (folder / "preprocessor_config.json").unlink()
    with LLM(str(folder), **SETTINGS) as llm:
        assert "has neither preprocessor_config.json nor processor_config.json" in refusal(llm, asked(made))


def test_other_forms_and_limits(made: Made, expected: list[int]) -> None:
    with LLM(str(made.folder), **SETTINGS, limit_mm_per_prompt={"audio": 1}, max_audio_seconds=3.0) as llm:
        given = asked(made)
        assert tokens(llm, given | {"multi_modal_data": {"audio": [(SOUND, RATE)]}}) == expected
        stereo = np.stack([SOUND, SOUND], axis=1)
        assert tokens(llm, asked(made, stereo)) == expected
        two = {"prompt": made.prompt("AUDIO AUDIO"), "multi_modal_data": {"audio": [(SOUND, RATE)] * 2}}
        assert "At most 1 audio(s) may be provided" in refusal(llm, two)
        assert "is 4.0 seconds long; audio may have 3" in refusal(llm, asked(made, sound(4.0)))
        assert "this model reads audio only" in refusal(llm, given | {"multi_modal_data": {"image": [1]}})
        assert "has 1 places of audio ('<|audio_pad|>')" in refusal(llm, given | {"multi_modal_data": {"audio": []}})


def test_after_a_sleep(made: Made, expected: list[int]) -> None:
    with LLM(str(made.folder), **SETTINGS, enable_sleep_mode=True) as llm:
        for level in (1, 2):
            assert tokens(llm, asked(made)) == expected
            llm.sleep(level)
            llm.wake_up()
        assert tokens(llm, asked(made)) == expected


def test_in_bfloat16(made: Made) -> None:
    """Close to float32, since random models have no clear answers."""
    with LLM(str(made.folder), **SETTINGS | {"dtype": "bfloat16"}) as llm:
        (output,) = llm.generate(asked(made), GREEDY.replace(max_tokens=1, logprobs=5))
    theirs = torch.log_softmax(made.logits("hear AUDIO?", [SOUND]), -1)
    ours = output.outputs[0].logprobs[0]
    assert {token: one.logprob for token, one in ours.items()} == pytest.approx(
        {token: theirs[token].item() for token in ours}, abs=0.25
    )


def test_random_weights(made: Made) -> None:
    with LLM(str(made.folder), **SETTINGS, load_format="dummy") as llm:
        assert len(tokens(llm, asked(made))) == 6


def test_fields_without_effect(made: Made) -> None:
    with pytest.raises(ConfigError, match="'max_audio_len', which has no effect on this model"):
        LLM(str(made.folder), **SETTINGS, mm_processor_kwargs={"max_audio_len": 1})


def test_what_the_model_would_cut_off_is_refused(tmp_path: Path) -> None:
    whisper = make("audio-flamingo-3", tmp_path)
    with LLM(str(whisper.folder), **SETTINGS, mm_processor_kwargs={"max_audio_len": 2}) as llm:
        assert tokens(llm, asked(whisper, sound(2.0))) == whisper.generated("hear AUDIO?", [sound(2.0)], 6)[1]
        said = refusal(llm, asked(whisper, sound(2.1)))
        assert "multi_modal_data.audio.0 is 2.1 seconds long, and the model takes 2; split it" in said
        assert "multi_modal_data.audio.0 has 10 ms of sound, too few" in refusal(llm, asked(whisper, sound(0.01)))
