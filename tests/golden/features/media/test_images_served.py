"""When a model's images are read, and what happens if they can't be."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from image_kit import Made, make, picture

from octavo import LLM, SamplingParams
from octavo.core.errors import ConfigError, InvalidRequestError, ModelFileError
from octavo.features.media.towers.llava import LlavaTower
from octavo.features.media.towers.tower import Encoding

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SETTINGS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 4 << 20, "threads": 1, "max_model_len": 256}
IMAGE = picture(40, 31)
ASKED: Any = {"prompt": "see <image>?", "multi_modal_data": {"image": IMAGE}}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make("llava", tmp_path_factory.mktemp("llava"))


def copied(made: Made, folder: Path) -> Path:
    return Path(shutil.copytree(made.folder, folder / "copy"))


def tokens(llm: LLM, asked: Any = ASKED) -> list[int]:
    return list(llm.generate(asked, GREEDY)[0].outputs[0].token_ids)


def refusal(llm: LLM) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate(ASKED, GREEDY)
    return str(caught.value)


def test_without_images_the_tower_is_not_loaded(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(str(made.folder), **SETTINGS) as llm:
        text = tokens(llm, "see?")

    def unused(*args: Any) -> None:
        raise AssertionError("a tower")

    monkeypatch.setattr(LlavaTower, "__init__", unused)
    with LLM(str(made.folder), **SETTINGS, limit_mm_per_prompt={"image": 0}) as llm:
        assert tokens(llm, "see?") == text
        assert "--limit-mm-per-prompt image=0" in refusal(llm)


def test_a_checkpoint_without_a_preprocessor(made: Made, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = copied(made, tmp_path)
    (folder / "preprocessor_config.json").unlink()
    with caplog.at_level(logging.WARNING), LLM(str(folder), **SETTINGS) as llm:
        assert "has neither preprocessor_config.json nor processor_config.json" in refusal(llm)
        assert len(tokens(llm, "see?")) == 6
    assert "the model is served for text only" in caplog.text


def test_the_processors_file_of_transformers_5(made: Made, tmp_path: Path) -> None:
    folder = copied(made, tmp_path)
    stated = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").unlink()
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": stated, "patch_size": 7}))
    with LLM(str(folder), **SETTINGS) as llm:
        assert tokens(llm) == made.generated("see IMAGE?", [IMAGE], 6)[1]


def test_a_checkpoint_that_lacks_the_tower(made: Made, tmp_path: Path) -> None:
    folder = copied(made, tmp_path)
    path = folder / "model.safetensors"
    kept = {name: one for name, one in safetensors.torch.load_file(path).items() if "vision_tower" not in name}
    safetensors.torch.save_file(kept, path)
    with pytest.raises(ModelFileError, match=r"needs tensor .*, which .* lacks.*--limit-mm-per-prompt"):
        LLM(str(folder), **SETTINGS)


def test_the_names_of_other_versions(made: Made, tmp_path: Path) -> None:
    folder = copied(made, tmp_path)
    path = folder / "model.safetensors"
    starts = {
        "vision_tower.": "model.vision_tower.vision_model.",
        "multi_modal_projector.": "model.multi_modal_projector.",
        "language_model.model.": "model.language_model.",
        "language_model.lm_head.": "lm_head.",
    }
    renamed = {}
    for name, tensor in safetensors.torch.load_file(path).items():
        start = next(start for start in starts if name.startswith(start))
        renamed[starts[start] + name.removeprefix(start)] = tensor
    safetensors.torch.save_file(renamed, path)
    with LLM(str(folder), **SETTINGS) as llm:
        assert tokens(llm) == made.generated("see IMAGE?", [IMAGE], 6)[1]


def test_fields_in_place_of_the_preprocessors(made: Made) -> None:
    with LLM(str(made.folder), **SETTINGS, mm_processor_kwargs={"image_std": [0.02, 0.02, 0.02]}) as llm:
        (output,) = llm.generate(ASKED, GREEDY.replace(max_tokens=1, logprobs=1))
    best, one = next(iter(output.outputs[0].logprobs[0].items()))
    theirs = torch.log_softmax(made.logits("see IMAGE?", [IMAGE]), -1)[best].item()
    assert abs(one.logprob - theirs) > 0.01
    with pytest.raises(ConfigError, match="'max_pixels', which has no effect on this model"):
        LLM(str(made.folder), **SETTINGS, mm_processor_kwargs={"max_pixels": 1000})


def test_architectures_whose_images_are_not_supported(made: Made, tmp_path: Path) -> None:
    folder = copied(made, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["Llama4ForConditionalGeneration"]
    (folder / "config.json").write_text(json.dumps(config))
    with LLM(str(folder), **SETTINGS) as llm:
        assert "images of Llama4ForConditionalGeneration are not supported: its tower" in refusal(llm)


def test_after_a_sleep(made: Made) -> None:
    with LLM(str(made.folder), **SETTINGS, enable_sleep_mode=True) as llm:
        before = tokens(llm)
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert tokens(llm) == before
    assert before == made.generated("see IMAGE?", [IMAGE], 6)[1]


def test_random_weights(made: Made) -> None:
    with LLM(str(made.folder), **SETTINGS, load_format="dummy") as llm:
        assert len(tokens(llm)) == 6


def test_in_bfloat16(made: Made) -> None:
    """Close to float32, since random models have no clear answers."""
    with LLM(str(made.folder), **SETTINGS | {"dtype": "bfloat16"}) as llm:
        (output,) = llm.generate(ASKED, GREEDY.replace(max_tokens=1, logprobs=5))
    theirs = torch.log_softmax(made.logits("see IMAGE?", [IMAGE]), -1)
    ours = output.outputs[0].logprobs[0]
    assert {token: one.logprob for token, one in ours.items()} == pytest.approx(
        {token: theirs[token].item() for token in ours}, abs=0.25
    )


def test_an_image_that_the_tower_fails_on_ends_its_request_only(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = LlavaTower.encoding

    def failing(tower: LlavaTower, images: torch.Tensor, layout: tuple[int, ...]) -> Encoding:
        if images[0, 0, 0].tolist() == [0, 0, 0]:
            raise RuntimeError("too dark")
        return encode(tower, images, layout)

    monkeypatch.setattr(LlavaTower, "encoding", failing)
    dark = {**ASKED, "multi_modal_data": {"image": IMAGE.point(lambda _: 0)}}
    with LLM(str(made.folder), **SETTINGS) as llm:
        found = list(llm.stream(ASKED, GREEDY))
        failed = list(llm.stream(dark, GREEDY))
        again = list(llm.stream(ASKED, GREEDY))
    assert found[-1].outputs[0].token_ids == again[-1].outputs[0].token_ids
    assert failed[-1].outputs[0].finish_reason == "error"
    assert "could not be encoded: too dark" in str(failed[-1].outputs[0].stop_reason)
