"""vLLM's `LLM` in a process of its own, in its environment. Settings: those of `LLM`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import vllm
from protocol import Pair, serve


class VllmEngine:
    def __init__(self, settings: dict[str, Any]) -> None:
        self._llm = vllm.LLM(**settings)
        self._served = 0

    def versions(self) -> Mapping[str, str]:
        return {"vllm": vllm.__version__, "torch": torch.__version__}

    def one(self, prompt: list[int], count: int, mark: Callable[[], None]) -> int:
        engine = self._llm.llm_engine
        self._served += 1
        engine.add_request(f"one-{self._served}", {"prompt_token_ids": prompt}, _params(count))
        seen = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                if not seen:
                    mark()
                seen = len(output.outputs[0].token_ids)
        return seen

    def many(self, pairs: list[Pair]) -> list[int]:
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in pairs],
            [_params(count) for _, count in pairs],
            use_tqdm=False,
        )
        return [len(output.outputs[0].token_ids) for output in outputs]


def _params(count: int) -> vllm.SamplingParams:
    return vllm.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)


if __name__ == "__main__":
    serve(VllmEngine)
