"""Settings of the device."""

from dataclasses import dataclass
from typing import Any, Literal

from octavo.core import quantities
from octavo.core.flag import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """Where the model runs.

    Attributes:
        threads: None takes the physical cores given to this process.
        cpu_bind: see `device/binding.py`.
        cpu_isa: "auto" or a name in `native/isa.py`.
        record_steps: see `engine/record.py`.
        profiler_config: see `core/profiling.py`. Empty uses the environment variable for the folder.
    """

    device: Literal["auto", "cpu", "cuda"] = setting("auto", "where the model runs")
    threads: int | None = setting(
        None, "compute threads on a CPU", shown="its physical cores", read=quantities.count, metavar="N"
    )
    cpu_bind: str = setting(
        "auto",
        "cores that the compute threads are bound to: a list like 0-3,8, nobind, or auto (those of one NUMA node)",
        flag="cpu-omp-threads-bind",
        env="OCTAVO_CPU_OMP_THREADS_BIND",
    )
    attention_backend: str | None = setting(
        None, "attention kernels to use (docs/gpu.md and docs/cpu.md list the names)", shown="the fastest that fits"
    )
    cpu_isa: str = setting("auto", "instruction set of the CPU kernels")
    enforce_eager: bool = setting(
        False, "launch every operation of every step instead of replaying CUDA graphs (on a GPU)"
    )
    disable_cascade_attn: bool = setting(
        False,
        "let each decoding request read its whole context, instead of reading common prefixes of contexts once "
        "(on a GPU)",
    )
    batch_invariant: bool = setting(
        False,
        "compute the same bits for a request whatever else is computed beside it, and however its prompt is divided",
        aliases=("enable-deterministic-inference",),
        env="OCTAVO_BATCH_INVARIANT",
    )
    distributed_executor_backend: Literal["uni", "mp", "ray"] = setting(
        "uni",
        "where the model runs: uni in the engine's process, or in one process per device if there are several; mp "
        "always in processes of its own; ray in processes that a Ray cluster starts on its machines (docs/parallel.md)",
    )
    record_steps: str | None = setting(
        None,
        "write every step of the engine to FILE, with the prompts' token ids; octavo replay-steps computes them again",
        metavar="FILE",
    )
    record_steps_limit: int = setting(
        1 << 30,
        "maximum size of that file; at this size, recording ends and the engine continues",
        read=quantities.size,
        metavar="SIZE",
    )
    profiler_config: dict[str, Any] = setting(
        {},
        'allow requests to make profiles of the engine (/start_profile), as JSON: {"profiler": "torch", '
        '"torch_profiler_dir": "FOLDER"}',
    )
