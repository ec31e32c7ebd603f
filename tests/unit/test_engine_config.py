"""Settings given to `LLM(...)` by name: each value that can't be is refused before a model is loaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.cli.flags.table import ENGINE_GROUPS, flags_of
from octavo.config import EngineConfig
from octavo.core import parsing, quantities
from octavo.core.errors import ConfigError
from octavo.core.flag import Flag
from octavo.python_api.replicas import check_replicas


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"dtype": "fp16"}, "dtype='fp16' is not known; choose one of: auto, float32, bfloat16, float16"),
        ({"load_format": "bin"}, "choose one of: auto, safetensors, gguf, dummy"),
        ({"device": "tpu"}, "choose one of: auto, cpu"),
        ({"max_model_len": "8x"}, "max_model_len: '8x' is not a whole number of at least 1, such as 2048, 8k or 8K"),
        ({"kv_cache_memory_bytes": "lots"}, "kv_cache_memory_bytes: 'lots' is not a size, such as 512MiB, 2G"),
        ({"max_logprobs": -2}, "max_logprobs=-2 must be a whole number of at least 1, or -1 for all"),
        ({"model": 5}, "model=5 must be a text"),
        ({"max_num_seqs": 0}, "max_num_seqs=0 must be a whole number of at least 1"),
        ({"block_size": -1}, "block_size=-1"),
        ({"block_size": True}, "block_size=True"),
        ({"seed": -1}, "seed=-1 must be a whole number of at least 0"),
        ({"gpu_memory_utilization": 90}, "gpu_memory_utilization=90 must be a number over 0 and up to 1"),
        ({"watermark": -0.1}, "watermark=-0.1 must be a number at least 0 and up to 1"),
        ({"num_gpu_blocks_override": 0}, "num_gpu_blocks_override=0 must be a whole number of at least 1"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching='no' must be True or False"),
    ],
)
def test_a_value_that_can_not_be_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.of(**settings)
    assert says in str(caught.value)


def test_an_unknown_setting_names_those_that_come_near() -> None:
    with pytest.raises(TypeError, match=r"there is no setting 'max_modl_len'; did you mean max_model_len"):
        EngineConfig.of(max_modl_len=5)


@pytest.mark.parametrize(
    ("given", "meant"), [("temprature", "; did you mean temperature?"), ("temperature", "it belongs to a request")]
)
def test_a_parameter_of_requests_is_no_setting(given: str, meant: str) -> None:
    with pytest.raises(TypeError, match=re.escape(meant)):
        EngineConfig.of(**{given: 0.5})


_TEXTS = {
    "cache.cpu_offload_gb": "0.5",
    "cache.memory_bytes": "256M",
    "cache.memory_utilization": "0.5",
    "scheduler.watermark": "0.5",
    "host_cache.kv_offloading_size": "0.5",
    "lora.max_lora_rank": "128",
    "media.mm_encoder_cache_gb": "0.5",
    "speculation.spec_tokens": "8",
}
_ENABLED_BY = {"lora": {"enable_lora": True}, "traffic": {"record_traffic": "trace.jsonl"}}
"""Sections -> the setting without which their other settings are refused."""


@pytest.mark.parametrize(
    "flag",
    [
        flag
        for flag in flags_of(ENGINE_GROUPS)
        if flag.read not in (str, parsing.json_object, parsing.word, parsing.dtype)
    ],
    ids=lambda flag: flag.name,
)
def test_a_setting_is_read_as_its_flag_is(flag: Flag) -> None:
    if isinstance(set_by(EngineConfig(), flag), tuple):
        return  # a list, not a number
    text = _TEXTS.get(flag.target, "8" if flag.read is quantities.natural else "8k")
    text = "5e5" if flag.read is quantities.positive else text
    enabled = _ENABLED_BY.get(flag.target.partition(".")[0], {})
    config = EngineConfig.of(**(enabled | {flag.name.replace("-", "_"): text}))
    assert set_by(config, flag) == flag.read(text)


def set_by(config: EngineConfig, flag: Flag) -> Any:
    """The value of the flag's setting, which may be a feature's."""
    section, field = flag.target.split(".")
    return getattr(config.features.get(section) or getattr(config, section), field)


def test_any_number_of_logprobs_may_be_allowed() -> None:
    assert EngineConfig.of(max_logprobs=-1).model.max_logprobs == -1


def test_values_that_are_fine() -> None:
    config = EngineConfig.of(
        model="m", dtype="float32", max_model_len=None, seed=0, gpu_memory_utilization=0.5, async_scheduling=False
    )
    assert (config.model.model, config.model.dtype, config.cache.memory_utilization) == ("m", "float32", 0.5)
    assert config.scheduler.depth == 0
    assert EngineConfig.of(async_scheduling=True, scheduling_policy="priority").scheduler.policy == "priority"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size=2: context parallelism is for prompts"),
        ({"enable_eplb": True}, "enable_eplb=True: balancing experts over ranks is not supported"),
        ({"speculative_model": "m"}, "another name of --spec-model) is not supported"),
        ({"enable_chunked_prefill": False}, "enable_chunked_prefill=False: long prompts are always computed in chunks"),
    ],
)
def test_features_of_others_are_refused_with_the_reason(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.of(**settings)
    assert says in str(caught.value)


def test_settings_of_others_that_ask_for_nothing_pass(caplog: pytest.LogCaptureFixture) -> None:
    neutral = {"tensor_parallel_size": 1, "hf_overrides": {}, "quantization": None, "enable_eplb": False}
    assert EngineConfig.of(**neutral, seed=None, block_size=None, max_model_len="auto") == EngineConfig()
    assert caplog.messages == []
    EngineConfig.of(swap_space=4, disable_log_stats=True)
    assert [message.split()[0] for message in caplog.messages] == ["swap_space", "disable_log_stats"]


@pytest.mark.parametrize(("word", "dtype"), [("half", "float16"), ("float", "float32"), (torch.bfloat16, "bfloat16")])
def test_a_dtype_by_other_words(word: Any, dtype: str) -> None:
    assert EngineConfig.of(dtype=word).model.dtype == dtype


def test_a_path_is_a_name_of_a_model() -> None:
    config = EngineConfig.of(model=Path("models/mine"), tokenizer=Path("other"))
    assert (config.model.model, config.model.tokenizer) == ("models/mine", "other")


def test_replicas_do_not_record_their_steps_in_one_file() -> None:
    EngineConfig.of(model="m", data_parallel_size=2, enable_expert_parallel=True, record_steps="steps").check()
    with pytest.raises(ConfigError, match=r"--record-steps steps: .* with --data-parallel-size 2 there are several"):
        EngineConfig.of(model="m", data_parallel_size=2, record_steps="steps").check()


def test_a_limit_of_a_record_that_is_not_written_is_refused() -> None:
    EngineConfig.of(record_steps="steps", record_steps_limit="1M").check()
    with pytest.raises(ConfigError, match=r"--record-steps-limit 1048576 is for --record-steps\. Set that flag"):
        EngineConfig.of(record_steps_limit="1M").check()


def test_replicas_that_need_more_gpus_than_there_are_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    config = EngineConfig.of(model="m", device="cuda", data_parallel_size=2, tensor_parallel_size=2)
    says = "--data-parallel-size 2 --tensor-parallel-size 2 needs 4 GPUs, but CUDA_VISIBLE_DEVICES=0,1,2 names 3. "
    with pytest.raises(ConfigError, match=f"{says}Lower the number, or set --device cpu"):  # not --nnodes: see `check`
        check_replicas(config)
