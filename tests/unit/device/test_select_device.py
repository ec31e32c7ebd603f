"""Which device a name stands for, and what is said where it can't be had."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.core.errors import ConfigError
from octavo.device import host
from octavo.device.cpu import CpuDevice
from octavo.device.cuda import CudaDevice
from octavo.device.select import select_device
from octavo.device.transfer import download, upload_parts


def test_auto_without_a_gpu_is_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert isinstance(select_device("auto"), CpuDevice)
    assert not select_device("cpu").resident


def test_cuda_without_a_gpu_says_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="--device cpu"):
        select_device("cuda")


class Small(CudaDevice):
    """A GPU of 10 GiB, 1 of them in use."""

    def __init__(self, engines: int = 1) -> None:
        self.name = "a small GPU"
        self.engines = engines
        self.torch_device = torch.device("cpu")

    def _memory(self) -> tuple[int, int, int]:
        return 9 << 30, 10 << 30, 0


def test_weights_that_do_not_fit_are_told_before_they_are_loaded():
    Small().check_fits(8 << 30, 0, None)
    with pytest.raises(ConfigError, match=r"8\.20 GiB of a small GPU's memory can be used.*--gpu-memory-utilization"):
        Small().check_fits(9 << 30, 0, None)
    Small().check_fits(int(8.9 * 2**30), 0, 0.999)


def test_on_a_cpu_weights_count_by_their_files(monkeypatch):
    monkeypatch.setattr(host, "available_memory", lambda: 8 << 30)
    monkeypatch.setattr(host, "free_swap", lambda: 1 << 30)
    CpuDevice().check_fits(30 << 30, 9 << 30, None)
    with pytest.raises(ConfigError, match=r"files of the weights hold 10\.00 GiB, but only 8\.00 GiB of memory"):
        CpuDevice().check_fits(30 << 30, 10 << 30, None)


def test_a_cache_that_is_asked_for_must_fit(monkeypatch):
    monkeypatch.setattr(host, "available_memory", lambda: 9 << 30)
    monkeypatch.setattr(host, "free_swap", lambda: 0)
    for device, where in ((Small(), "a small GPU"), (CpuDevice(), "memory")):
        device.check_cache(8 << 30, 1 << 30)
        with pytest.raises(
            ConfigError, match=rf"would take 10\.00 GiB .*is less\), but 9\.00 GiB of {where} .*--kv-cache-memory"
        ):
            device.check_cache(10 << 30, 1 << 30)
        with pytest.raises(ConfigError, match=r"the largest step needs 2\.00 GiB of them\. Lower --kv-cache"):
            device.check_cache(8 << 30, 2 << 30)


def test_the_kv_cache_gets_what_is_left():
    assert Small().kv_budget(None, 5 << 30, 2 << 30) == int(10 * 2**30 * 0.92) - (1 << 30) - (2 << 30) - (1 << 30)
    with pytest.raises(ConfigError, match="--max-num-batched-tokens"):
        Small().kv_budget(0.5, 5 << 30, 4 << 30)


def test_what_the_kv_cache_can_have_is_known_before_the_weights_are_loaded(monkeypatch):
    assert Small().most_kv(None, 5 << 30) == int(10 * 2**30 * 0.92) - (1 << 30) - (5 << 30) - (1 << 30)
    assert Small().most_kv(0.5, 5 << 30) == 0
    monkeypatch.setattr(host, "available_memory", lambda: 12 << 30)
    assert CpuDevice().most_kv(None, 5 << 30) == 1 << 30
    assert CpuDevice().most_kv(None, 1 << 30) == 4 << 30
    assert CpuDevice().most_kv(0.75, 1 << 30) == 8 << 30


def test_engines_that_share_a_gpu_have_equal_parts_and_only_what_is_free(monkeypatch):
    gib = 1 << 30
    own = [0]
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: own[0])
    part = int(10 * gib * 0.92 / 2)
    assert Small(2).most_kv(None, 0) == part - gib
    own[0] = gib  # what is in use is this engine's own
    assert Small(2).most_kv(None, 0) == part - gib - gib
    monkeypatch.setattr(Small, "_memory", lambda self: (3 * gib, 10 * gib, 0))  # another engine has 6
    assert Small(2).most_kv(None, 0) == int(10 * gib * 0.92) - 7 * gib - gib
    monkeypatch.setattr(Small, "_memory", lambda self: (9 * gib, 10 * gib, 0))
    assert Small(2).most_kv(0.7, 0) == int(10 * gib * 0.7) - gib - gib


def test_engines_that_share_a_cpu_divide_the_limit_of_the_default_cache(monkeypatch):
    monkeypatch.setattr(host, "available_memory", lambda: 64 << 30)
    device = CpuDevice()
    device.engines = 4
    assert device.most_kv(None, 1 << 30) == device.kv_budget(None, 1 << 30) == 1 << 30
    assert device.most_kv(0.5, 1 << 30) == device.kv_budget(0.5, 1 << 30) == 31 << 30


def test_a_cpu_keeps_room_for_steps(monkeypatch):
    free = [10 << 30]
    monkeypatch.setattr(host, "available_memory", lambda: free[0])
    device = CpuDevice()
    free[0] = 3 << 30  # reading the weights took more than they do
    assert device.kv_budget(None, 1 << 30, 1 << 30) == 2 << 30
    assert device.kv_budget(0.9, 1 << 30, 1 << 30) == 2 << 30
    with pytest.raises(ConfigError, match=r"3\.00 GiB of memory are free.* needs 3\.00 GiB.*Lower --max-num-seqs"):
        device.kv_budget(None, 1 << 30, 3 << 30)


def test_ranks_of_one_machine_divide_its_memory(monkeypatch):
    monkeypatch.setattr(host, "available_memory", lambda: 20 << 30)
    device = CpuDevice()
    device.setup(1, "nobind", 1, 2)
    assert device.most_kv(None, 2 << 30) == 3 << 30
    assert device.kv_budget(0.9, 2 << 30, 1 << 30) == 7 << 30
    monkeypatch.setattr(host, "available_memory", lambda: 8 << 30)  # after the weights
    assert device.kv_budget(0.9, 2 << 30, 1 << 30) == 3 << 30
    with pytest.raises(
        ConfigError, match=r"weights take 6\.00 GiB.*of 10\.00 GiB available memory for each of 2 ranks"
    ):
        device.kv_budget(None, 6 << 30, 1 << 30)
    with pytest.raises(ConfigError, match=r"4\.00 GiB of memory are free for each of 2 ranks, but"):
        device.kv_budget(None, 2 << 30, 5 << 30)


def test_parts_begin_on_16_bytes_and_hold_their_values():
    parts = [np.arange(n, dtype=np.int32) for n in (3, 0, 8, 5)]
    sent = upload_parts(parts, torch.device("cpu"))
    assert [part.tolist() for part in sent] == [part.tolist() for part in parts]
    assert {(part.data_ptr() - sent[0].data_ptr()) % 16 for part in sent} == {0}


def test_a_download_holds_the_values_of_when_it_began():
    tensor = torch.arange(4)
    values = download(tensor)
    tensor.zero_()
    assert values.wait().tolist() == [0, 1, 2, 3]


def test_more_threads_than_a_machine_may_start_are_refused_and_no_crash() -> None:
    with pytest.raises(ConfigError, match="--threads 100000 is more than the 1,024 that may be"):
        CpuDevice().setup(100_000, "nobind")


@pytest.mark.parametrize(("fast", "chosen"), [(True, torch.bfloat16), (False, torch.float32)])
def test_float16_on_a_cpu_is_computed_in_what_suits_it(monkeypatch, caplog, fast, chosen):
    monkeypatch.setattr(host, "has_fast_bfloat16", lambda: fast)
    assert CpuDevice().pick_dtype("float16", "float32") is chosen
    name = str(chosen).removeprefix("torch.")
    assert caplog.messages == [f"--dtype float16 is slow and inexact on a CPU: computing in {name} instead"]
