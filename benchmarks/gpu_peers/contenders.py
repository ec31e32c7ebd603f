"""The engines that are compared: how each is started in a Python process and as a server, with its own defaults."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines import Launch

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent.parent
WORKERS = HERE.parent / "cpu_peers" / "workers"
SERVED_NAME = "model"
_MAX_MODEL_LEN = 16_384


@dataclass(frozen=True, slots=True)
class Setup:
    """What the engines are started with.

    Attributes:
        python: the interpreter that has torch; the same for all engines.
        site: a folder of further packages, such as `pip install --target` makes it; None for none.
        model: a folder with config.json and a tokenizer; weights are random.
        device: for Octavo; "cuda", or "cpu" for a trial.
    """

    python: Path
    site: Path | None
    model: Path
    device: str = "cuda"

    @property
    def max_model_len(self) -> int:
        config = json.loads((self.model / "config.json").read_text(encoding="utf-8"))
        return min(_MAX_MODEL_LEN, config["max_position_embeddings"])

    def environment(self, caches: Path) -> dict[str, str]:
        """Variables of an engine that keeps everything it compiles or downloads below `caches`."""
        sources = [str(SOURCE), *([str(self.site)] if self.site else [])]
        return {
            "PYTHONPATH": os.pathsep.join(sources),
            "HOME": str(caches),
            "XDG_CACHE_HOME": str(caches / "xdg"),
            "TRITON_CACHE_DIR": str(caches / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "OCTAVO_KERNEL_CACHE": str(caches / "octavo"),
            "VLLM_CACHE_ROOT": str(caches / "vllm"),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }


@dataclass(frozen=True, slots=True)
class Contender:
    """One engine with one order of requests.

    Attributes:
        offline: the settings of its `LLM`, beside those that all have.
        serve: the command of its server after the interpreter; None if only its offline lines are compared.
        lines: the offline lines that it runs; None for all.
    """

    name: str
    engine: str
    policy: str
    offline: Mapping[str, Any]
    serve: Callable[[Setup], tuple[str, ...]] | None
    lines: tuple[str, ...] | None = None

    def worker(self, setup: Setup, caches: Path) -> Launch:
        settings = {
            "model": str(setup.model),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_model_len": setup.max_model_len,
            **({"device": setup.device} if self.engine == "octavo" else {}),
            **self.offline,
        }
        script = WORKERS / f"{self.engine}_worker.py"
        return Launch((str(setup.python), str(script), json.dumps(settings)), self._environment(setup, caches))

    def server(self, setup: Setup, caches: Path) -> Launch:
        assert self.serve is not None
        return Launch((str(setup.python), *self.serve(setup)), self._environment(setup, caches))

    def _environment(self, setup: Setup, caches: Path) -> dict[str, str]:
        extra = vllm_without_flashinfer(setup) if self.engine == "vllm" else {}
        return {**setup.environment(caches), **extra}


def vllm_without_flashinfer(setup: Setup) -> dict[str, str]:
    """vLLM ends at its start if FlashInfer, which samples with top-k and top-p, is not there and not switched off.

    All lines here are greedy, so nothing that is measured uses it.
    """
    there = importlib.util.find_spec("flashinfer") is not None
    there = there or (setup.site is not None and (setup.site / "flashinfer").is_dir())
    return {} if there else {"VLLM_USE_FLASHINFER_SAMPLER": "0"}


def _octavo_server(setup: Setup) -> tuple[str, ...]:
    return ("-m", "octavo", "serve", str(setup.model), "--device", setup.device, *_server_flags(setup))


def _vllm_server(setup: Setup) -> tuple[str, ...]:
    return ("-m", "vllm.entrypoints.cli.main", "serve", str(setup.model), *_server_flags(setup))


def _server_flags(setup: Setup) -> tuple[str, ...]:
    return (
        *("--load-format", "dummy", "--max-model-len", str(setup.max_model_len)),
        *("--served-model-name", SERVED_NAME, "--port", "{port}"),
    )


CONTENDERS = {
    each.name: each
    for each in (
        Contender("octavo", "octavo", "fcfs", {"scheduling_policy": "fcfs"}, _octavo_server),
        Contender(
            "octavo longest-first", "octavo", "longest-first", {"scheduling_policy": "longest-first"}, None, ("chat",)
        ),
        Contender("vllm", "vllm", "fcfs", {}, _vllm_server),
    )
}
