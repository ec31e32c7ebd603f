from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from octavo.bench.report import Summary, check_place, percentile, save
from octavo.bench.timing import Timing
from octavo.core.errors import ConfigError


def timing(arrivals: list[float], *, tokens: int | None = None, latency: float | None = None) -> Timing:
    return Timing(
        prompt_tokens=10,
        output_tokens=len(arrivals) if tokens is None else tokens,
        arrivals=arrivals,
        latency=arrivals[-1] if latency is None else latency,
    )


FAILED = Timing(prompt_tokens=10, error="HTTP 500")


def test_percentiles_interpolate() -> None:
    assert percentile([4, 1, 3, 2], 50) == 2.5
    assert percentile([1, 2, 3, 4, 5], 99) == pytest.approx(4.96)
    assert percentile([7], 99) == 7
    assert percentile([1, 2], 0) == 1
    assert percentile([1, 2], 100) == 2
    assert math.isnan(percentile([], 50))


def test_the_figures() -> None:
    runs = [timing([0.1, 0.2, 0.4]), timing([0.3, 0.5]), FAILED]
    figures = Summary.of(runs, 2.0).figures(["ttft", "tpot", "itl", "e2el"], [99.0])
    expected = {
        "duration": 2.0,
        "completed": 2,
        "failed": 1,
        "total_input_tokens": 20,
        "total_output_tokens": 5,
        "request_throughput": 1.0,
        "output_throughput": 2.5,
        "total_token_throughput": 12.5,
        "mean_ttft_ms": 200,
        "median_ttft_ms": 200,
        "p99_ttft_ms": 298,
        "mean_tpot_ms": 175,
        "mean_itl_ms": pytest.approx((100 + 200 + 200) / 3),
        "median_itl_ms": 200,
        "mean_e2el_ms": 450,
    }
    assert {name: figures[name] for name in expected} == pytest.approx(expected)


def test_single_tokens_do_not_count_into_time_per_output_token() -> None:
    figures = Summary.of([timing([0.1]), timing([0.1, 0.3])], 1.0).figures(["tpot"], [50.0])
    assert figures["mean_tpot_ms"] == pytest.approx(200)


def test_goodput_counts_requests_that_meet_every_goal() -> None:
    runs = [timing([0.1, 0.2]), timing([0.1, 0.9]), timing([0.8, 0.9]), FAILED]
    summary = Summary.of(runs, 2.0, {"ttft": 500, "e2el": 500})
    assert summary.figures([], [])["request_goodput"] == 0.5
    assert "goodput" in summary.text([], [])


def test_the_printed_report_names_what_scripts_look_for() -> None:
    printed = Summary.of([timing([0.1, 0.2])], 1.0).text(["ttft", "tpot", "itl"], [99.0])
    for label in [
        "Successful requests:",
        "Benchmark duration (s):",
        "Total input tokens:",
        "Total generated tokens:",
        "Request throughput (req/s):",
        "Output token throughput (tok/s):",
        "Total token throughput (tok/s):",
        *(f"{kind} {metric} (ms):" for kind in ("Mean", "Median", "P99") for metric in ("TTFT", "TPOT", "ITL")),
    ]:
        assert label in printed


def test_nothing_went_through(tmp_path: Path) -> None:
    summary = Summary.of([FAILED], 1.0)
    assert "nan" in summary.text(["ttft"], [99.0])
    save(summary.figures(["ttft"], [99.0]), tmp_path / "deep" / "r.json")
    saved = json.loads((tmp_path / "deep" / "r.json").read_text())
    assert saved["completed"] == 0
    assert saved["mean_ttft_ms"] is None


def test_a_place_for_figures_is_checked_before_they_are_measured(tmp_path: Path) -> None:
    """A folder, or a file where a folder should be; a new folder is made with the file, and not before."""
    check_place(None, "--output-json")
    check_place(tmp_path / "new" / "a.json", "--output-json")
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").touch()
    check_place(tmp_path / "file", "--output-json")
    for odd in (tmp_path, tmp_path / "file" / "a.json"):
        with pytest.raises(ConfigError, match=rf"--output-json {odd} can't be written\. Name a file"):
            check_place(odd, "--output-json")
