"""`octavo simulate` and `octavo tune` as users call them, with a profile of made-up step times."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.main import main
from octavo.cli.simulation import changeable, other_flags
from octavo.core.worker_info import LoadedFacts, WorkerFacts
from octavo.simulate.model import Curve, FitErrors, StepModel
from octavo.simulate.profile import FORM, Profile, read_profile, write_profile

FACTS = WorkerFacts(
    device="toy",
    accelerator="cpu",
    torch_device="cpu",
    default_depth=0,
    default_limits=(256, 2048, 2048),
    balanced_tokens=0,
    dtype="bfloat16",
    vocab_size=100,
    hidden_size=8,
    max_position=4096,
)
LOADED = LoadedFacts(weight_bytes=1, weight_form="", kv_bytes_per_token=64, block_size=16, kv_budget=64 * 20_000)
STEPS = StepModel(Curve([1, 64, 256], [0.01, 0.012, 0.03]), Curve([2, 256, 2048], [0.01, 0.03, 0.25]), 1e-8, 1e-9, 1e-5)
ERRORS = FitErrors(9, 0.01, 0.02, 0.0)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    profile = Profile(
        form=FORM,
        version="0",
        model="the model",
        settings={"scheduler.max_num_seqs": 128},
        flags=["--dtype", "bfloat16"],
        facts=FACTS,
        loaded=LOADED,
        depth=0,
        largest=(256, 2048),
        steps=STEPS,
        errors=ERRORS,
    )
    write_profile(profile, tmp_path / "profile")
    assert read_profile(tmp_path / "profile") == profile
    lines = [
        {"timestamp": 100 * number, "input_length": 1500 if number % 4 == 0 else 60, "output_length": 30}
        for number in range(60)
    ]
    (tmp_path / "trace").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "profile", tmp_path / "trace"


def flags(files: tuple[Path, Path]) -> list[str]:
    return ["--profile", str(files[0]), "--trace", str(files[1])]


def test_a_simulation_reports_as_the_bench_does(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.json"
    assert main(["simulate", *flags(files), "--percentile-metrics", "ttft,e2el", "--output-json", str(output)]) == 0
    shown, figures = capsys.readouterr().out, json.loads(output.read_text())
    assert f"P99 TTFT (ms):                          {figures['p99_ttft_ms']:.2f}" in shown
    assert "Successful requests:                    60" in shown
    assert figures["total_output_tokens"] == 60 * 30
    assert (figures["preemptions"], figures["steps"] > 30) == (0, True)


def simulated(files: tuple[Path, Path], tmp_path: Path, *more: str) -> dict[str, Any]:
    output = tmp_path / "out.json"
    assert main(["simulate", *flags(files), "--output-json", str(output), *more]) == 0
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def test_settings_change_what_is_simulated(files: tuple[Path, Path], tmp_path: Path) -> None:
    plain = simulated(files, tmp_path)
    assert simulated(files, tmp_path) == plain
    assert simulated(files, tmp_path, "--max-num-batched-tokens", "256")["p99_itl_ms"] < plain["p99_itl_ms"] / 2
    assert simulated(files, tmp_path, "--trace-speed", "0.1")["mean_ttft_ms"] < plain["mean_ttft_ms"]
    assert simulated(files, tmp_path, "--num-gpu-blocks-override", "110")["max_kv_usage"] > plain["max_kv_usage"]
    later = simulated(files, tmp_path, "--front-end-ms", "20")
    assert later["mean_ttft_ms"] == pytest.approx(plain["mean_ttft_ms"] + 20)
    assert simulated(files, tmp_path, "--num-prompts", "5")["completed"] == 5
    assert simulated(files, tmp_path, "--max-num-seqs", "1")["mean_ttft_ms"] > plain["mean_ttft_ms"]


@pytest.mark.parametrize("flag", ["--dtype", "--tensor-parallel-size", "--kv-cache-dtype", "--model"])
def test_settings_that_change_steps_are_refused(files: tuple[Path, Path], flag: str) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", *flags(files), flag, "1"])


def test_steps_beyond_the_measured_ones_are_told(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    main(["simulate", *flags(files), "--max-num-batched-tokens", "4096"])
    assert "steps of up to 256 rows and 2048 tokens; times of larger ones are extrapolated" in capsys.readouterr().err


def test_refused_requests_are_counted_with_the_reason(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *flags(files), "--max-model-len", "1000"]) == 0
    out, err = capsys.readouterr()
    assert "Failed requests:                        15" in out
    assert "refused (15 of 60)" in err


def test_bad_files_are_named(files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile, trace = files
    for given, expected in (
        ((trace, trace), "is not a profile of step times"),
        ((tmp_path / "none", trace), "Make one with octavo bench steps"),
        ((profile, profile), "is not a line of a trace"),
    ):
        assert main(["simulate", *flags(given)]) == 1
        assert expected in capsys.readouterr().err
    profile.write_text(profile.read_text().replace(f'"form": {FORM}', '"form": 99'))
    assert main(["simulate", *flags(files)]) == 1
    assert "has form 99" in capsys.readouterr().err


def test_tuning_finds_settings_and_says_how_to_confirm_them(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "tuned.json"
    assert main(["tune", *flags(files), "--goal", "itl p99 < 60ms", "--output-json", str(output)]) == 0
    shown, found = capsys.readouterr().out, json.loads(output.read_text())
    best = found["recommended"]
    assert best["missed"] == 0 < found["now"]["missed"]
    assert best["capacity"] > 1 > found["now"]["capacity"]
    assert best["settings"]["max_num_batched_tokens"] < 2048
    assert "itl p99 < 60 ms: kept" in shown
    serve, bench = (shlex.split(line) for line in shown.splitlines()[-2:])
    assert serve[:5] == ["octavo", "serve", "the model", "--dtype", "bfloat16"]
    assert serve[serve.index("--max-num-batched-tokens") + 1] == str(best["settings"]["max_num_batched_tokens"])
    assert bench[:7] == ["octavo", "bench", "serve", "--dataset-name", "timed_trace", "--dataset-path", str(files[1])]
    again = tmp_path / "again.json"
    main(["simulate", *flags(files), *serve[5:], "--output-json", str(again)])
    assert json.loads(again.read_text())["p99_itl_ms"] == pytest.approx(best["goals_ms"]["itl p99"])


def test_a_goal_that_nothing_keeps_is_told(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", *flags(files), "--num-prompts", "9", "--goal", "ttft p99 < 1ms"]) == 1
    assert "ttft p99 < 1 ms: not kept" in capsys.readouterr().out


def test_settings_are_divided_into_those_that_simulations_change_and_others() -> None:
    found = {
        "model.model": "m",
        "scheduler.max_num_seqs": 4,
        "cache.enable_prefix_caching": False,
        "model.dtype": "float32",
        "device.enforce_eager": True,
        "parallel.node_key": "secret",
        "device.profiler_config": {"a": 1},
    }
    assert changeable(found) == {"scheduler.max_num_seqs": 4, "cache.enable_prefix_caching": False}
    assert sorted(other_flags(found)) == sorted(
        ["--dtype", "float32", "--enforce-eager", "--profiler-config", '{"a":1}']
    )
