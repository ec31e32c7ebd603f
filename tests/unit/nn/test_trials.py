"""Kernels that fail their trial are not used, and the log says why."""

from __future__ import annotations

import pytest

from octavo.nn.ops.nvrtc import CudaError, trusted


@pytest.mark.parametrize(
    ("deviations", "expected"),
    [([0.001, 0.002], True), ([0.001, 0.01], False), ([0.001, float("nan"), 0.002], False), ([float("nan")], False)],
)
def test_products_that_deviate_are_left_to_triton(
    deviations: list[float], expected: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert trusted("Experts are multiplied", lambda: deviations, 0.01) is expected
    assert ("Experts are multiplied by kernels in Triton: a trial deviates" in caplog.text) is not expected


def test_kernels_that_do_not_run_are_left_to_triton(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> list[float]:
        raise CudaError("no such device")

    assert not trusted("Experts are multiplied", fails, 0.01)
    assert "Experts are multiplied by kernels in Triton: no such device" in caplog.text
