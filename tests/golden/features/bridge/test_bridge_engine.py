"""A bridged model in a whole engine: other weights, sleep, embeddings, beams, grammars; and code of the model's own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_tokenizers
from bridge_kit import load_bridged, save
from safetensors import safe_open
from transformers import PreTrainedModel

from octavo import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from octavo.nn.attention.reference import ReferenceAttention

SETTINGS: dict[str, Any] = {
    "model_impl": "transformers",
    "kv_cache_memory_bytes": 1 << 20,
    "max_num_seqs": 4,
    "threads": 1,
    "dtype": "float32",
}
PROMPTS = [{"prompt_token_ids": [5, 6, 7, 8] * 9}, {"prompt_token_ids": [9, 10]}]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, PreTrainedModel]]:
    made = {}
    for name in ("arcee", "ministral"):
        folder = tmp_path_factory.mktemp(name)
        made[name] = folder, save(name, folder, vocab_size=464, tie_word_embeddings=name == "ministral")
        toy_tokenizers.byte_level().save(str(folder / "tokenizer.json"))
    return made


@pytest.fixture(scope="module")
def llm(models: dict[str, tuple[Path, PreTrainedModel]]) -> Iterator[LLM]:
    with LLM(str(models["arcee"][0]), **SETTINGS) as made:
        yield made


def tokens(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("name", [pytest.param("arcee", marks=pytest.mark.slow), "ministral"])
def test_other_weights_and_sleep(models: dict[str, tuple[Path, PreTrainedModel]], name: str, tmp_path: Path) -> None:
    """Of a head of its own, and of one that is the embedding table."""
    folder, _ = models[name]
    save(name, tmp_path, vocab_size=464, tie_word_embeddings=name == "ministral", initializer_range=0.3)
    toy_tokenizers.byte_level().save(str(tmp_path / "tokenizer.json"))
    with LLM(str(tmp_path), **SETTINGS) as other:
        after = tokens(other)
    with LLM(str(folder), **SETTINGS, enable_sleep_mode=True) as llm:
        before = tokens(llm)
        assert before != after
        llm.update_weights_from_disk(str(tmp_path))
        assert tokens(llm) == after
        llm.sleep(1)
        llm.wake_up()
        assert tokens(llm) == after
        llm.update_weights_from_disk(str(folder))
        llm.sleep(2)
        llm.wake_up()
        assert tokens(llm) == before


def test_embeddings_are_those_of_the_last_token(models: dict[str, tuple[Path, PreTrainedModel]]) -> None:
    folder, theirs = models["arcee"]
    ids = PROMPTS[0]["prompt_token_ids"]
    with torch.no_grad():
        state = theirs.model(torch.tensor([ids])).last_hidden_state[0, -1]
    with LLM(str(folder), **SETTINGS, runner="pooling") as llm:
        found = llm.embed([PROMPTS[0]], normalize=False)[0].outputs.embedding
    torch.testing.assert_close(torch.tensor(found), state, rtol=1e-4, atol=1e-4)


def test_beams_and_grammars(llm: LLM) -> None:
    found = llm.beam_search(["abc"], BeamSearchParams(3, 5, ignore_eos=True))
    assert len(found[0].sequences) == 3
    asked = StructuredOutputsParams(regex="[ab]{4}")
    params = SamplingParams(temperature=0, max_tokens=8, structured_outputs=asked)
    assert re.fullmatch("[ab]{4}", llm.generate(["x"], params)[0].outputs[0].text)


def test_tensors_that_a_checkpoint_stores_otherwise(tmp_path: Path) -> None:
    """Experts are stored one by one, and are one tensor of the module."""
    save("qwen3-moe", tmp_path)
    with safe_open(next(tmp_path.glob("*.safetensors")), framework="pt") as stored:
        assert "model.layers.0.mlp.experts.3.gate_proj.weight" in stored.keys()  # noqa: SIM118
    model = load_bridged(tmp_path, ReferenceAttention())
    assert model.body.get_parameter("layers.0.mlp.experts.gate_up_proj").shape == (4, 96, 64)


CONFIGURATION = """
from transformers import LlamaConfig

class MyConfig(LlamaConfig):
    model_type = "my-own"
"""
MODELING = """
from transformers import LlamaForCausalLM
from .configuration_my import MyConfig

class MyForCausalLM(LlamaForCausalLM):
    config_class = MyConfig

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = -output.logits
        return output
"""


def test_code_of_the_model_runs_when_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its logits are Llama's with the sign reversed."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "model"
    theirs = save("llama", folder)
    (folder / "configuration_my.py").write_text(CONFIGURATION)
    (folder / "modeling_my.py").write_text(MODELING)
    config = json.loads((folder / "config.json").read_text()) | {
        "architectures": ["MyForCausalLM"],
        "model_type": "my-own",
        "auto_map": {"AutoConfig": "configuration_my.MyConfig", "AutoModelForCausalLM": "modeling_my.MyForCausalLM"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    ids = PROMPTS[0]["prompt_token_ids"]
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0, -1].argmin()
    params = SamplingParams(temperature=0, max_tokens=1)
    with LLM(str(folder), **SETTINGS, skip_tokenizer_init=True, trust_remote_code=True) as llm:
        assert llm.generate([PROMPTS[0]], params)[0].outputs[0].token_ids == [expected]
