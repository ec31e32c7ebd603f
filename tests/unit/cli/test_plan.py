"""`octavo plan`: what it prints, and that what it recommends is enough."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import plan
from octavo.core.errors import ConfigError
from octavo.core.gpus import GPUS
from octavo.device import host

SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
    },
    "qwen3-30b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "torch_dtype": "bfloat16",
    },
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write("llama-8b", tmp_path)


def write(name: str, folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(SHAPES[name]))
    return folder


def planned(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, Any]:
    """The exit status, and the JSON."""
    status = plan.run([*map(str, words), "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_an_8b_model_on_an_h200(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An engine of this shape had 16,068,911,104 bytes of weights and 116,941,389,824 for its KV cache."""
    status, found = planned(capsys, folder, "--gpu", "h200")
    assert status == 0
    assert found["fits"]
    assert found["parameters"] == 8_030_261_248
    assert found["memory"]["weights"] == pytest.approx(16_068_911_104, rel=0.002)
    assert found["memory"]["kv_cache"] == pytest.approx(116_941_389_824, rel=0.01)
    assert found["kv_bytes_per_token"] == 131_072
    assert found["longest_request"] == 131_072
    rates = found["output_tokens_per_second_at_most"]["1024"]
    assert 252 < rates["1"] < 330
    assert 44_000 < found["input_tokens_per_second_at_most"] < 70_000


def test_experts_of_a_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, found = planned(capsys, write("qwen3-30b", tmp_path), "--gpu", "h200")
    assert found["parameters"] == 30_532_122_624
    assert 3.0e9 < found["active_parameters"] < 3.4e9
    assert found["weights"]["experts"] == 48 * 128 * 3 * 2048 * 768 * 2


@pytest.mark.parametrize("gpu", ["l4", "4060ti", "12GiB"])
def test_each_remedy_is_enough(gpu: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [folder, "--gpu", gpu, "--max-model-len", "90k"]
    status, found = planned(capsys, *words)
    assert status == 1
    assert found["memory"]["missing"] > 0
    assert plan.run(list(map(str, words))) == 1
    text = capsys.readouterr().out
    remedies = re.findall(r"(--[a-z-]+) ([\w.]*\w)", text.partition("It would with one of: ")[2])
    assert remedies
    for flag, value in remedies:
        assert planned(capsys, *words, flag, value)[0] == 0, flag


def test_all_gpus(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = planned(capsys, folder, "--gpu", "all")
    assert status == 0
    assert [one["gpu"] for one in found] == [gpu.name for gpu in GPUS.values()]
    by_name = {one["gpu"]: one["gpus"] for one in found}
    assert by_name["H200"] == 1
    assert by_name["RTX 4060 Ti 16GB"] == 2
    assert plan.run([str(folder), "--gpu", "all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(GPUS) + 4


def test_the_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan.run([str(folder), "--gpu", "4090", "--cpu-offload-gb", "8"])
    text = capsys.readouterr().out
    assert "LlamaForCausalLM): 8.03 billion parameters" in text
    assert re.search(r"in the host's memory +8\.\d GiB  copied by each step", text)
    assert re.search(r"KV cache +1\d\.\d GiB  a token takes up to 128\.0 KiB", text)


def test_memory_alone_has_no_rates(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, found = planned(capsys, folder, "--gpu", "48GiB")
    assert found["input_tokens_per_second_at_most"] is None
    plan.run([str(folder), "--gpu", "48GiB"])
    assert "tokens/s" not in capsys.readouterr().out


def test_stages_and_replicas(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = planned(capsys, folder, "--gpu", "h100")[1]
    status, found = planned(capsys, folder, "--gpu", "h100", "-pp", 2, "-tp", 2, "-dp", 3)
    assert status == 0
    assert found["gpus"] == 12
    assert found["stages"] == 2
    assert found["parameters"] == one["parameters"]
    assert 0.24 < found["memory"]["weights"] / one["memory"]["weights"] < 0.28
    assert plan.run([str(folder), "--gpu", "h100", "-pp", "2"]) == 0
    assert re.search(r"weights +\d\.\d GiB  of stage \d of 2, the fullest", capsys.readouterr().out)


def test_experts_divided_over_ranks_with_requests_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write("qwen3-30b", tmp_path)
    one = planned(capsys, folder, "--gpu", "h100")[1]
    found = planned(capsys, folder, "--gpu", "h100", "-dp", 4, "--enable-expert-parallel")[1]
    assert found["gpus"] == 4
    assert found["weights"]["experts"] == one["weights"]["experts"] // 4
    mixers = "attention and other mixers"
    assert found["weights"][mixers] == one["weights"][mixers]
    assert found["kv_bytes_per_token"] == one["kv_bytes_per_token"]
    assert found["requests"]["4096"] == min(
        1024, 4 * (found["memory"]["kv_cache"] // found["kv_bytes_per_token"] // 4096)
    )


def test_the_hosts_memory_for_all_gpus_of_a_machine(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [folder, "--gpu", "4090", "--cpu-offload-gb", "2", "-tp", "4"]
    found = planned(capsys, *words)[1]["memory"]
    assert found["host_of_one_machine"] == 4 * found["weights_in_host_memory"]
    halved = planned(capsys, *words, "--nnodes", 2)[1]["memory"]
    assert halved["host_of_one_machine"] == 2 * found["weights_in_host_memory"]
    plan.run([*map(str, words)])
    assert re.search(r"copied by each step; \d+\.\d GiB for 4 GPUs of a machine", capsys.readouterr().out)


def test_memory_of_a_cpu(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [folder, "--device", "cpu", "--dtype", "bfloat16"]
    status, found = planned(capsys, *words, "--memory", "64GiB")
    assert status == 0
    assert found["memory"]["gpu"] == 64 << 30
    assert found["memory"]["kv_cache"] == 4 << 30
    assert found["memory"]["graphs"] == 0
    status, found = planned(capsys, *words, "--memory", "20GiB")
    assert status == 1
    plan.run([*map(str, words), "--memory", "20GiB"])
    text = capsys.readouterr().out
    assert "It would with one of: --gpu-memory-utilization 0.9" in text
    assert planned(capsys, *words, "--memory", "20GiB", "--gpu-memory-utilization", "0.9")[0] == 0
    assert planned(capsys, *words, "--memory", "8GiB")[0] == 1


def test_memory_of_this_machine(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "available_memory", lambda: 48 << 30)
    _, found = planned(capsys, folder, "--device", "cpu")
    assert found["memory"]["gpu"] == 48 << 30


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--device", "cpu", "--gpu", "h100"], "--gpu h100 has no effect with --device cpu"),
        (["--memory", "8GiB"], "--memory 8GiB is for --device cpu"),
        (["--device", "cpu", "--memory", "much"], "--memory much: "),
    ],
)
def test_flags_of_the_other_device(words: list[str], says: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        plan.run([str(folder), *words])


@pytest.mark.parametrize("gpu", ["h300", "100", "many"])
def test_unknown_gpus_name_the_known_ones(gpu: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=f"--gpu {gpu} must be one of b200, h200"):
        plan.run([str(folder), "--gpu", gpu])


@pytest.mark.parametrize(
    "flags", [("--kv-cache-memory-bytes", "1G"), ("--performance-mode", "throughput"), ("--threads", "2")]
)
def test_settings_that_it_does_not_use_are_no_flags(flags: tuple[str, str], folder: Path) -> None:
    with pytest.raises(SystemExit):
        plan.run([str(folder), "--gpu", "h100", *flags])


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [("--quantization", "fp7", "there is no such method"), ("--kv-cache-dtype", "int8", "is for CPUs")],
)
def test_what_a_gpu_refuses(flag: str, value: str, says: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        plan.run([str(folder), "--gpu", "h100", flag, value])


def test_quantized_weights_that_are_not_here(folder: Path) -> None:
    stated = SHAPES["llama-8b"] | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}
    (folder / "config.json").write_text(json.dumps(stated))
    with pytest.raises(ConfigError, match="download them with octavo pull"):
        plan.run([str(folder), "--gpu", "h100"])
