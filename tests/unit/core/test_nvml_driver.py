"""`Nvml` with a real driver agrees with nvidia-smi."""

from __future__ import annotations

import shutil
import subprocess
import time

import pytest

from octavo.core.nvml import Nvml

FIELDS = "index,name,uuid,memory.total,power.limit,driver_version,compute_mode,mig.mode.current"


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs an NVIDIA GPU, and nvidia-smi")
def test_it_says_what_nvidia_smi_says() -> None:
    command = ["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    nvml = Nvml.load()
    began = time.perf_counter()
    states = nvml.states()
    print(f"all GPUs read in {(time.perf_counter() - began) * 1000:.2f} ms", *states, sep="\n")
    setups = nvml.setups()
    print(nvml.driver_version, nvml.cuda_version, setups)
    assert len(states) == len(lines) > 0
    for state, line in zip(states, lines, strict=True):
        index, name, uuid, total, limit, driver, mode, mig = (word.strip() for word in line.split(","))
        assert (str(state.index), state.name, state.uuid, nvml.driver_version) == (index, name, uuid, driver)
        assert state.memory_total is not None
        assert state.memory_total / 2**20 == pytest.approx(float(total), abs=2)
        assert state.power_limit_w == pytest.approx(float(limit), abs=0.01)
        assert state.busy is not None
        assert 0 <= state.busy <= 1
        assert state.temperature_c is not None
        assert 0 < state.temperature_c < 120
        assert state.sm_clock_hz is not None
        assert 1e8 < state.sm_clock_hz < 1e10
        assert setups[state.index].compute_mode == mode.lower().replace("_", " ")
        assert setups[state.index].mig == {"Enabled": True, "Disabled": False}.get(mig)
    nvml.close()
