"""OpenVINO GenAI's continuous batching in a process of its own, in its environment.

Settings: `model`, a GGUF file or a folder; `scheduler`, fields of SchedulerConfig; `properties`, of the CPU plugin.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import openvino as ov
import openvino_genai as genai
from protocol import Pair, serve


class OpenVINOEngine:
    def __init__(self, settings: dict[str, Any]) -> None:
        scheduler = genai.SchedulerConfig()
        for name, value in settings["scheduler"].items():
            setattr(scheduler, name, value)
        self._pipe = genai.ContinuousBatchingPipeline(settings["model"], scheduler, "CPU", settings["properties"])
        self._served = 0

    def versions(self) -> Mapping[str, str]:
        return {"openvino": ov.__version__, "openvino-genai": genai.__version__}

    def one(self, prompt: list[int], count: int, mark: Callable[[], None]) -> int:
        handle = self._add(prompt, count)
        tokens: list[int] = []
        while self._pipe.has_non_finished_requests():
            self._pipe.step()
            while handle.can_read():
                if not tokens:
                    mark()
                tokens.extend(next(iter(handle.read().values())).generated_ids)
        return len(tokens)

    def many(self, pairs: list[Pair]) -> list[int]:
        handles = [self._add(prompt, count) for prompt, count in pairs]
        while self._pipe.has_non_finished_requests():
            self._pipe.step()
        return [len(handle.read_all()[0].generated_ids) for handle in handles]

    def _add(self, prompt: list[int], count: int) -> Any:
        self._served += 1
        config = genai.GenerationConfig(max_new_tokens=count, ignore_eos=True, do_sample=False)
        return self._pipe.add_request(self._served, ov.Tensor(np.array([prompt], dtype=np.int64)), config)


if __name__ == "__main__":
    serve(OpenVINOEngine)
