"""Octavo's `LLM` in a process of its own. Settings: those of `LLM`, `model` among them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from protocol import Pair, serve

from octavo import LLM, SamplingParams
from octavo.version import __version__


class OctavoEngine:
    def __init__(self, settings: dict[str, Any]) -> None:
        self._llm = LLM(**settings)

    def versions(self) -> Mapping[str, str]:
        import torch

        return {"octavo": __version__, "torch": torch.__version__}

    def one(self, prompt: list[int], count: int, mark: Callable[[], None]) -> int:
        seen = 0
        for output in self._llm.stream(prompt, _params(count)):
            if not seen:
                mark()
            seen = max(seen, len(output.outputs[0].token_ids))
        return seen

    def many(self, pairs: list[Pair]) -> list[int]:
        outputs = self._llm.generate([prompt for prompt, _ in pairs], [_params(count) for _, count in pairs])
        return [len(output.outputs[0].token_ids) for output in outputs]


def _params(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)


if __name__ == "__main__":
    serve(OctavoEngine)
