"""`python -m octavo.engine_main`: an engine core's process. Started by `CoreProcess`, never by hand."""

from __future__ import annotations

import logging
import os
import sys
from functools import partial

from octavo.config import DeviceConfig, EngineConfig
from octavo.core.garbage import Garbage
from octavo.core.info import ModelInfo
from octavo.core.log import FORM
from octavo.core.memory import check_address_space, memory_errors
from octavo.device.early import is_cpu
from octavo.engine.core_server import LOST, CoreServer
from octavo.engine.loop import EngineLoop
from octavo.engine.phases import OnPhase
from octavo.engine.process import keep_freed_memory, receive_payload, switch_threads_often
from octavo.hub.files import ModelFiles
from octavo.native.build import build_ahead
from octavo.native.needs import needed_libraries


def main() -> int:
    listener, (config, files, log) = receive_payload()
    log.set_up(FORM)
    code = CoreServer(listener, Garbage()).run(partial(_start, config, files))
    if code == LOST:
        _leave(code)
    return code


def _start(config: EngineConfig, files: ModelFiles, on_phase: OnPhase) -> tuple[EngineLoop, ModelInfo]:
    with memory_errors():
        check_address_space()
        if _uses_cpu_kernels(config.device):  # while torch is imported and the weights are read
            model, kv_cache = config.model, config.cache.kv_cache_dtype
            needed = partial(needed_libraries, files, model.dtype, model.load_format, kv_cache, model.activation_dtype)
            build_ahead(config.device.cpu_isa, needed)
        from octavo.build import build_core  # imports torch

        core = build_core(config, files, on_phase)
    keep_freed_memory()
    switch_threads_often()
    return core


def _leave(code: int) -> None:
    """End the process now: destructors of tensors and graphs fail or hang on a lost device."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _uses_cpu_kernels(device: DeviceConfig) -> bool:
    """Return whether Octavo's CPU kernels will probably run, judged without importing torch."""
    if (device.attention_backend or "native").lower() not in ("native", "cpu_attn"):
        return False
    return is_cpu(device.device)


if __name__ == "__main__":
    sys.exit(main())
