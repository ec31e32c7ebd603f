"""Every engine in every form that is compared: what it is called, what must be there for it, how it is started."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engines import Launch, RunningEngine, ServerEngine, WorkerEngine

_CACHES = {"octavo": ("OCTAVO_CACHE",), "vllm": ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR")}
"""Engine -> the variables that say where it keeps what it compiles."""
HERE = Path(__file__).resolve().parent
SERVED_NAME = "model"
ACTIVATIONS = ("int8", "int16", "bfloat16")
_OCTAVO_SOURCE = {"PYTHONPATH": str(HERE.parent.parent), "PYTHONSAFEPATH": "1"}
"""The Octavo that this file lies beside, whatever is installed and wherever this runs."""
GIB = 1 << 30


def multiplies_bfloat16(cpuinfo: str) -> bool:
    """Whether a processor has instructions for it, by what Linux says in /proc/cpuinfo.

    Without them, torch multiplies bfloat16 at less than a hundredth of float32's rate (0.3 GFLOP/s on two cores of a
    Zen 3), so vLLM and OpenVINO get the same weights in float32.
    """
    return bool({"avx512_bf16", "amx_bf16"} & set(cpuinfo.split()))


def _float_dtype() -> str:
    path = Path("/proc/cpuinfo")
    return "bfloat16" if not path.exists() or multiplies_bfloat16(path.read_text()) else "float32"


@dataclass(frozen=True, slots=True)
class KVSize:
    """Room for so many tokens, which take so many bytes with keys and values of 16 bits."""

    tokens: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Setup:
    """What the engines are started with.

    Attributes:
        kv: room in their KV caches.
        pythons: engine -> the interpreter of its environment.
        llama_server: its binary, if it was built.
        gguf: form -> the model's file.
        folder: the model as safetensors in bfloat16.
        cores: the processors to use, one thread on each.
        logs: where the engines' output goes.
    """

    kv: KVSize
    pythons: dict[str, Path]
    llama_server: Path | None
    gguf: dict[str, Path]
    folder: Path | None
    cores: tuple[int, ...]
    logs: Path


@dataclass(frozen=True, slots=True)
class Variant:
    """One engine with one form of the weights, over HTTP or in a Python process.

    Attributes:
        activations: what they are rounded to where weights stay integers, if Octavo is told; else "".
        group: the variants that take turns with each other: "http" or "process", and "16" or "8" bits.
    """

    name: str
    engine: str
    format: str
    transport: str
    launch: Callable[[Setup], Launch]
    activations: str = ""

    @property
    def group(self) -> str:
        return f"{self.transport}-{'16' if self.format == 'bf16' else '8'}bit"

    @property
    def multiplies_bfloat(self) -> bool:
        """Else integers."""
        return self.format == "bf16" or self.activations == "bfloat16"

    def start(self, setup: Setup, environment: Mapping[str, str] | None = None) -> RunningEngine:
        """Start its processes."""
        log = setup.logs / f"{self.transport}-{self.name.replace(' ', '-')}.log"
        launch = self.launch(setup)
        launch = replace(launch, environment={**launch.environment, **(environment or {})})
        if self.transport == "http":
            return ServerEngine(launch, setup.cores, log, model=SERVED_NAME)
        return WorkerEngine(launch, setup.cores, log)

    def empty_caches(self, folder: Path) -> dict[str, str]:
        """Environment variables with which the engine finds nothing that an earlier run compiled; {} if none does."""
        return {name: str(folder / name) for name in _CACHES.get(self.engine, ())}


def _octavo_settings(kind: str, activations: str) -> dict[str, str]:
    return {"dtype": "bfloat16"} if kind == "bf16" else {"activation_dtype": activations}


def _octavo_server(kind: str, activations: str) -> Callable[[Setup], Launch]:
    def launch(setup: Setup) -> Launch:
        flags = [
            part
            for name, value in _octavo_settings(kind, activations).items()
            for part in (f"--{name.replace('_', '-')}", value)
        ]
        return Launch(
            (
                *(str(setup.pythons["octavo"]), "-m", "octavo", "serve", str(setup.gguf[kind]), *flags),
                *("--served-model-name", SERVED_NAME, "--port", "{port}", "--threads", str(len(setup.cores))),
                *("--kv-cache-memory-bytes", str(setup.kv.num_bytes)),
            ),
            _OCTAVO_SOURCE,
        )

    return launch


def _octavo_process(kind: str, activations: str) -> Callable[[Setup], Launch]:
    def launch(setup: Setup) -> Launch:
        settings = {
            "model": str(setup.gguf[kind]),
            "threads": len(setup.cores),
            "kv_cache_memory_bytes": setup.kv.num_bytes,
            **_octavo_settings(kind, activations),
        }
        return _worker("octavo", settings, _OCTAVO_SOURCE)(setup)

    return launch


def _worker(
    engine: str, settings: dict[str, Any], environment: dict[str, str] | None = None
) -> Callable[[Setup], Launch]:
    def launch(setup: Setup) -> Launch:
        script = HERE / "workers" / f"{engine}_worker.py"
        return Launch((str(setup.pythons[engine]), str(script), json.dumps(settings)), environment or {})

    return launch


def _llama_server(kind: str) -> Callable[[Setup], Launch]:
    def launch(setup: Setup) -> Launch:
        threads = str(len(setup.cores))
        return Launch(
            (
                *(str(setup.llama_server), "-m", str(setup.gguf[kind]), "--alias", SERVED_NAME),
                *("--port", "{port}", "-t", threads, "-tb", threads),
                *("-c", str(setup.kv.tokens), "-np", "64", "--kv-unified", "-b", "2048", "-ub", "512"),
                *("--cache-ram", "0", "--no-webui"),
            )
        )

    return launch


def _vllm_environment(setup: Setup) -> dict[str, str]:
    return {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in setup.cores),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _vllm_server(setup: Setup) -> Launch:
    return Launch(
        (
            *(str(setup.pythons["vllm"]), "-m", "vllm.entrypoints.openai.api_server", "--model", str(setup.folder)),
            *("--served-model-name", SERVED_NAME, "--port", "{port}", "--host", "127.0.0.1", "--dtype", _float_dtype()),
            *("--kv-cache-memory-bytes", str(setup.kv.num_bytes), "--max-model-len", "4096"),
        ),
        _vllm_environment(setup),
    )


def _vllm_process(setup: Setup) -> Launch:
    settings = {
        "model": str(setup.folder),
        "dtype": _float_dtype(),
        "kv_cache_memory_bytes": setup.kv.num_bytes,
        "max_model_len": 4096,
    }
    return _worker("vllm", settings, _vllm_environment(setup))(setup)


def _openvino_process(kind: str) -> Callable[[Setup], Launch]:
    def launch(setup: Setup) -> Launch:
        settings = {
            "model": str(setup.gguf["f16" if kind == "bf16" else kind]),
            "scheduler": {
                "cache_size": max(1, -(-setup.kv.num_bytes // GIB)),
                "max_num_batched_tokens": 2048,
                "enable_prefix_caching": True,
            },
            "properties": {
                "INFERENCE_NUM_THREADS": len(setup.cores),
                "INFERENCE_PRECISION_HINT": {"bfloat16": "bf16", "float32": "f32"}[_float_dtype()],
            },
        }
        return _worker("openvino", settings)(setup)

    return launch


def earlier(variant: Variant, source: Path) -> Variant:
    """Return the same form of Octavo, run from another checkout; figures treat it as a peer."""

    def launch(setup: Setup) -> Launch:
        now = variant.launch(setup)
        return replace(now, environment={**now.environment, "PYTHONPATH": str(source)})

    return replace(variant, name=f"earlier {variant.name}", launch=launch)


def _all() -> list[Variant]:
    found = []
    for kind in ("bf16", "q4_1", "q4_0", "q8_0"):
        for activations in ("",) if kind == "bf16" else ACTIVATIONS:
            name = f"octavo {kind} {activations}".strip()
            http, process = _octavo_server(kind, activations), _octavo_process(kind, activations)
            found.append(Variant(name, "octavo", kind, "http", http, activations))
            found.append(Variant(name, "octavo", kind, "process", process, activations))
        found.append(Variant(f"llama.cpp {kind}", "llama.cpp", kind, "http", _llama_server(kind)))
        found.append(Variant(f"openvino {kind}", "openvino", kind, "process", _openvino_process(kind)))
    found.append(Variant("vllm bf16", "vllm", "bf16", "http", _vllm_server))
    found.append(Variant("vllm bf16", "vllm", "bf16", "process", _vllm_process))
    return found


VARIANTS: Sequence[Variant] = tuple(_all())
ENGINES = ("octavo", "llama.cpp", "vllm", "openvino")
