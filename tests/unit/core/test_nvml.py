"""`Nvml` reads what the driver's library reports, and lives with what it does not."""

from __future__ import annotations

from typing import Any

import pytest
from nvml_kit import GIB, FakeGpu, FakeNvml

from octavo.core.nvml import SLOWED, GpuState, Nvml, NvmlError, chosen


def test_what_a_gpu_reports() -> None:
    nvml = Nvml(FakeNvml(FakeGpu(slowed=SLOWED["thermal"] | SLOWED["power_cap"] | 1)))
    assert nvml.driver_version == "580.65.06"
    assert nvml.cuda_version == (13, 0)
    assert nvml.states() == [
        GpuState(
            index=0,
            name="NVIDIA H200",
            uuid="GPU-0a",
            busy=0.75,
            memory_busy=0.4,
            memory_used=20 * GIB,
            memory_total=140 * GIB,
            power_w=pytest.approx(512.345),
            power_limit_w=pytest.approx(700.0),
            temperature_c=61,
            sm_clock_hz=1980e6,
            memory_clock_hz=3201e6,
            slowed=("power_cap", "thermal"),
            ecc_corrected=3,
            ecc_uncorrected=0,
        )
    ]


def test_what_a_gpu_does_not_support_is_none() -> None:
    bare = FakeGpu(
        busy=None,
        memory=None,
        power=None,
        temperature=None,
        clocks={},
        slowed=None,
        ecc=None,
        mode=None,
        mig=None,
        rows=None,
    )
    nvml = Nvml(FakeNvml(bare))
    assert nvml.states() == [GpuState(index=0, name="NVIDIA H200", uuid="GPU-0a")]
    setup = nvml.setups()[0]
    assert (setup.compute_mode, setup.mig, setup.repair_pending, setup.default_power_limit_w) == (
        None,
        None,
        None,
        None,
    )


def test_an_older_library_lacks_functions() -> None:
    library: Any = FakeNvml(FakeGpu())
    library.nvmlDeviceGetComputeRunningProcesses_v3 = library.nvmlDeviceGetTotalEccErrors = None
    nvml = Nvml(library)
    assert nvml.states()[0].ecc_corrected is None
    assert nvml.setups()[0].processes is None


def test_a_lost_gpu_keeps_the_numbers_of_the_others() -> None:
    nvml = Nvml(FakeNvml(FakeGpu(lost=True), FakeGpu(uuid="GPU-1b")))
    assert [(gpu.index, gpu.uuid) for gpu in nvml.states()] == [(1, "GPU-1b")]
    assert list(nvml.setups()) == [1]


def test_how_gpus_are_set_up() -> None:
    many = [(1000 + number, number << 20) for number in range(80)]
    first = FakeGpu(mode=3, mig=1, rows=(1, 0), processes=many, peers_apart={1})
    setups = Nvml(FakeNvml(first, FakeGpu(power=(100_000, 500_000, 700_000)))).setups()
    assert setups[0].compute_mode == "exclusive process"
    assert setups[0].mig
    assert (setups[0].repair_pending, setups[0].repair_failed) == (True, False)
    assert setups[0].processes == tuple(many), "more than the buffer had room for at first"
    assert (setups[0].no_peers, setups[1].no_peers) == ((1,), ())
    assert setups[1].default_power_limit_w == 700.0


def test_without_a_driver() -> None:
    with pytest.raises(NvmlError, match="nvmlInit_v2 failed with status 9"):
        Nvml(FakeNvml(init=9))
    with pytest.raises(NvmlError, match=r"no-such-library\.so can't be loaded"):
        Nvml.load("no-such-library.so")


GPUS = [GpuState(index=0, name="", uuid="GPU-0a12"), GpuState(index=1, name="", uuid="GPU-1b34")]


@pytest.mark.parametrize(
    ("stated", "indices"),
    [
        (None, [0, 1]),
        ("", []),
        ("1", [1]),
        ("1, 0", [1, 0]),
        ("GPU-1b", [1]),
        ("0,7,1", [0]),
        ("-1", []),
        ("MIG-1234", [0, 1]),
    ],
)
def test_which_gpus_a_process_may_use(stated: str | None, indices: list[int]) -> None:
    assert [gpu.index for gpu in chosen(GPUS, stated)] == indices
