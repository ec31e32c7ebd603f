"""`python -m octavo.cli.doctor.probe`: import torch and compute a little, in a process of its own, since a broken
installation may kill it. Prints `Probe` as JSON in its last line."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time

import msgspec


class Probe(msgspec.Struct, kw_only=True):
    """What torch can do here.

    Attributes:
        torch, triton: versions; "" if not installed.
        torch_error, triton_error: why it can't be imported; "" if it can.
        import_s: seconds of importing torch.
        cuda: version of CUDA that torch was built for; "" for none.
        available: torch finds a usable GPU.
        gpus: (name, compute capability) of those that torch finds.
        built_for: what torch's kernels are compiled for, such as "sm_90" or "compute_90".
        unavailable: torch's warning why it can't use the driver.
        cpu_error, gpu_error, kernel_error: why a product on the CPU, one on each GPU, and a kernel of Octavo's compiled
            by Triton fails; "" if it gives the right numbers, or was not tried.
    """

    torch: str = ""
    torch_error: str = ""
    import_s: float = 0.0
    cuda: str = ""
    available: bool = False
    gpus: list[tuple[str, tuple[int, int]]] = []
    built_for: list[str] = []
    unavailable: str = ""
    triton: str = ""
    triton_error: str = ""
    cpu_error: str = ""
    gpu_error: str = ""
    kernel_error: str = ""


def probe(*, gpu: bool) -> Probe:
    """Return what torch can do.

    Args:
        gpu: also use GPUs, if there are any.
    """
    found = Probe()
    began = time.perf_counter()
    try:
        import torch
    except Exception as error:  # a library that is missing or does not fit raises OSError or others
        found.torch_error = _line(error)
        return found
    found.import_s = time.perf_counter() - began
    found.torch = str(torch.__version__)
    found.cuda = torch.version.cuda or ""
    found.cpu_error = _tried(lambda: _check_product("cpu"))
    if not gpu:
        return found
    _read_triton(found)
    _read_gpus(found)
    if found.available:
        for number in range(len(found.gpus)):
            found.gpu_error = found.gpu_error or _tried(lambda number=number: _check_product(f"cuda:{number}"))
        if found.triton and not found.gpu_error:
            found.kernel_error = _tried(_check_kernel)
    return found


def _read_triton(found: Probe) -> None:
    if importlib.util.find_spec("triton") is None:
        return
    try:
        found.triton = str(importlib.import_module("triton").__version__)
    except Exception as error:  # as for torch
        found.triton_error = _line(error)


def _read_gpus(found: Probe) -> None:
    import warnings

    import torch

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found.available = torch.cuda.is_available()
    found.unavailable = str(told[0].message) if told and not found.available else ""
    found.built_for = torch.cuda.get_arch_list() if found.available else []
    count = torch.cuda.device_count() if found.available else 0
    found.gpus = [(torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)) for i in range(count)]


def _check_product(device: str) -> None:
    import torch

    one = torch.arange(64 * 64, device=device, dtype=torch.float32).view(64, 64) % 7
    if not torch.equal((one @ one).cpu(), one.cpu() @ one.cpu()):
        raise ArithmeticError(f"a matrix product on {device} gives wrong numbers")


def _check_kernel() -> None:
    import torch

    from octavo.nn.ops.triton_activation import silu_mul

    both = torch.linspace(-4, 4, 256, device="cuda").view(2, 128)
    gate, up = both.chunk(2, dim=-1)
    if not torch.allclose(silu_mul(both), torch.nn.functional.silu(gate) * up, atol=1e-4):
        raise ArithmeticError("a kernel that Triton compiled gives wrong numbers")


def _tried(run: object) -> str:
    assert callable(run)
    try:
        run()
    except Exception as error:  # of any library
        return _line(error)
    return ""


def _line(error: Exception) -> str:
    """Return an error as one line. Compilers' messages have the reason in a later one."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    telling = next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")
    return f"{type(error).__name__}: {telling}"[:500]


def main() -> int:
    found = probe(gpu="--gpu" in sys.argv)
    print(msgspec.json.encode(found).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
