"""Flags of the engine in a script's own parser."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

import octavo
from octavo import AsyncEngineArgs, EngineArgs
from octavo.config import EngineConfig
from octavo.core.errors import ConfigError


def parsed(*words: str, **defaults: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=3)
    assert EngineArgs.add_cli_args(parser) is parser
    parser.set_defaults(**defaults)
    return parser.parse_args(words)


def test_what_is_parsed_are_keywords_of_an_engine() -> None:
    args = vars(parsed("--max_model_len", "2K", "--gpu-memory-utilization=0.5", "--async-scheduling", model="m"))
    assert args.pop("prompts") == 3
    config = EngineConfig.of(**args)
    assert (config.model.model, config.model.max_model_len, config.scheduler.depth) == ("m", 2048, 1)
    assert config.cache.memory_utilization == 0.5
    assert config.device == EngineConfig().device


def test_a_scripts_own_arguments_stay_its_own() -> None:
    args = parsed("--prompts", "5", "--seed", "7", "--cpu-omp-threads-bind", "nobind")
    assert vars(AsyncEngineArgs.from_cli_args(args)) == {"model": None, "seed": 7, "cpu_omp_threads_bind": "nobind"}


def test_flags_of_other_engines_are_judged_when_an_engine_is_made() -> None:
    EngineArgs.from_cli_args(
        parsed("--decode-context-parallel-size", "1", "--swap-space", "4", "--enable-chunked-prefill")
    )
    with pytest.raises(ConfigError, match="context parallelism is for prompts"):
        EngineArgs.from_cli_args(parsed("-dcp", "2"))


def test_a_wrong_value_is_an_error_of_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--max-num-seqs", "many")
    assert "--max-num-seqs" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parsed("--help")
    shown = capsys.readouterr().out
    assert "--max-num-seqs" in shown
    assert "--decode-context-parallel-size" not in shown


@pytest.mark.features("beams", "pooling")
def test_every_name_of_the_package_is_there() -> None:
    for name in octavo.__all__:
        assert getattr(octavo, name) is not None
    assert octavo.AsyncLLMEngine is octavo.AsyncLLM
