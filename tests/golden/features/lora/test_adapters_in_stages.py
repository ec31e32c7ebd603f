"""Stages in processes of their own, over gloo, with adapters and drafts: the tokens of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tiny import make_checkpoint, model_files
from tiny_adapters import save_adapter
from toy_engine import drive, tiny_config, tokens_of

from octavo.build import build_core
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.features.lora.payload import NAME
from octavo.features.lora.requests import Part, encode


@pytest.mark.slow
@pytest.mark.features("speculation")
@pytest.mark.parametrize(("ranks", "backend"), [(1, "torch"), (2, "torch"), (1, "native")])
def test_tokens(ranks: int, backend: str, tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path, changes={"vocab_size": 200})
    config = msgspec.json.decode((tmp_path / "config.json").read_bytes())
    names = {"a": 4, "b": 8}
    folders = {name: save_adapter(tmp_path / name, config, seed=rank, rank=rank) for name, rank in names.items()}
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    asked = [
        GenerateRequest(
            id=str(i),
            tokens=[7, 8, 9, 7, 8, 9, 7, 8 + i],
            params=params,
            options={NAME: encode((Part(name),))} if name else {},
        )
        for i, name in enumerate(["a", "", "b", "a"])
    ]

    def run(**settings: Any) -> tuple[dict[tuple[str, int], list[int]], float]:
        modules = tuple(f"{name}={path}" for name, path in folders.items())
        own = {"load_format": "auto", "attention_backend": backend, "device": "cpu", "cpu_bind": "nobind"}
        loop = build_core(tiny_config(lora_modules=modules, **own, **settings), model_files(tmp_path))[0]
        found = tokens_of(drive(loop, asked))
        counts = {one.name: sum(one.values.values()) for one in loop.stats().features}
        loop.close()
        return found, counts.get("spec_decode_num_draft_tokens", 0)

    drafts = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False, "prompt_lookup_min": 1}
    expected, _ = run()
    found, count = run(pipeline_parallel_size=2, tensor_parallel_size=ranks, speculative_config=drafts)
    assert found == expected
    assert count > 10
