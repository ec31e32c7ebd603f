"""New weights of a running engine replace the tower, too; what the old one encoded is not used any more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import audio_kit
import image_kit
import pytest
from safetensors.torch import load_file

from octavo import LLM, SamplingParams
from octavo.core.errors import InvalidRequestError

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SETTINGS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": 4 << 20, "threads": 1, "max_model_len": 512}
IMAGE = image_kit.picture(40, 31)
PLACES = {"image": "IMAGE", "audio": "AUDIO"}
SOUND = audio_kit.sound(0.7)


def answer(llm: LLM, made: Any, kind: str) -> list[int]:
    given: Any = IMAGE if kind == "image" else (SOUND, audio_kit.RATE)
    prompt = {"prompt": made.prompt(f"look: {PLACES[kind]}?")}
    (found,) = llm.generate(prompt | {"multi_modal_data": {kind: given}}, GREEDY)  # type: ignore[arg-type]
    return list(found.outputs[0].token_ids)


def expected(made: Any, kind: str) -> list[int]:
    given: list[Any] = [IMAGE] if kind == "image" else [SOUND]
    return list(made.generated(f"look: {PLACES[kind]}?", given, 8)[1])


@pytest.mark.parametrize(
    ("kit", "name", "kind"),
    [(image_kit, "llava-next", "image"), (image_kit, "qwen3-vl", "image"), (audio_kit, "qwen2-audio", "audio")],
)
def test_the_tower_is_the_other_one_afterwards(kit: Any, name: str, kind: str, tmp_path: Path) -> None:
    first, second = (kit.make(name, tmp_path / str(seed), seed) for seed in (1, 2))
    wanted = [expected(made, kind) for made in (first, second)]
    assert wanted[0] != wanted[1]
    with LLM(str(first.folder), **SETTINGS) as llm:
        assert answer(llm, first, kind) == wanted[0]
        llm.update_weights_from_disk(str(second.folder))
        assert answer(llm, first, kind) == wanted[1]
        llm.start_weight_update()
        tensors = load_file(first.folder / "model.safetensors")
        llm.update_weights({"update_info": {"tensors": tensors.items()}})
        llm.finish_weight_update()
        assert answer(llm, first, kind) == wanted[0]


def of_tower(name: str) -> bool:
    return "vision_tower." in name or "multi_modal_projector." in name


def test_weights_without_a_tower_leave_it(tmp_path: Path) -> None:
    """Only the tower is the first one's afterwards, as in a model that is trained without it."""
    first, second = (image_kit.make("llava", tmp_path / str(seed), seed) for seed in (1, 2))
    tensors = load_file(second.folder / "model.safetensors")
    text = {name: one for name, one in tensors.items() if not of_tower(name)}
    assert len(text) < len(tensors)
    model = first.model.state_dict()
    state = {name: model[name] if of_tower(name) else one for name, one in second.model.state_dict().items()}
    with LLM(str(first.folder), **SETTINGS) as llm:
        before = answer(llm, first, "image")
        llm.start_weight_update()
        llm.update_weights({"update_info": {"tensors": text.items()}})
        llm.finish_weight_update()
        first.model.load_state_dict(state)
        assert answer(llm, first, "image") == expected(first, "image") != before


def test_a_tower_of_other_shapes_changes_nothing(tmp_path: Path) -> None:
    first = image_kit.make("llava", tmp_path / "1", 1)
    tensors = load_file(first.folder / "model.safetensors")
    name = next(name for name in tensors if "multi_modal_projector" in name and name.endswith("weight"))
    tensors[name] = tensors[name][:-1].contiguous()
    with LLM(str(first.folder), **SETTINGS) as llm:
        before = answer(llm, first, "image")
        llm.start_weight_update()
        llm.update_weights({"update_info": {"tensors": tensors.items()}})
        with pytest.raises(InvalidRequestError, match="has shape"):
            llm.finish_weight_update()
        assert answer(llm, first, "image") == before
