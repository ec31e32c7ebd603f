"""Settings from the command line, a file and the environment."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from octavo.cli import serve
from octavo.cli.flags.args import add_engine_settings, add_settings, convert, engine_from, server_from, values
from octavo.cli.flags.parser import OctavoParser
from octavo.cli.flags.table import ENGINE_GROUPS, SERVER_GROUPS, flags_of
from octavo.config import EngineConfig, ServerConfig
from octavo.core.errors import ConfigError

ALL = flags_of(ENGINE_GROUPS, SERVER_GROUPS)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    for flag in ALL:
        if flag.env:
            monkeypatch.delenv(flag.env, raising=False)
            monkeypatch.delenv(flag.env.replace("OCTAVO_", "VLLM_"), raising=False)


def make_parser() -> OctavoParser:
    parser = OctavoParser("octavo serve")
    add_engine_settings(parser)
    add_settings(parser, SERVER_GROUPS)
    return parser


def parse(*argv: str) -> tuple[EngineConfig, ServerConfig]:
    parser = make_parser()
    found = values(parser, parser.parse_args(list(argv)))
    return engine_from(found), server_from(found)


def test_the_size_of_the_cache_in_the_other_servers_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    assert parse()[0].cache.memory_bytes == 2 << 30
    assert parse("--kv-cache-memory-bytes", "1M")[0].cache.memory_bytes == 1 << 20
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0")
    assert parse()[0].cache.memory_bytes is None


def test_nothing_given_is_the_defaults() -> None:
    assert parse() == (EngineConfig(), ServerConfig())


def test_every_field_has_a_flag() -> None:
    targets = {flag.target for flag in ALL}
    sections = {section.name: getattr(EngineConfig(), section.name) for section in dataclasses.fields(EngineConfig)}
    for name, section in (sections | sections.pop("features")).items():
        for field in dataclasses.fields(section):
            assert f"{name}.{field.name}" in targets
    for field in dataclasses.fields(ServerConfig):
        assert f"server.{field.name}" in targets


def test_shown_defaults_are_the_real_ones() -> None:
    """Numbers and words in the help that restate a dataclass default must agree with it."""
    for flag in ALL:
        section, field = flag.target.split(".")
        config = EngineConfig()
        owner = ServerConfig() if section == "server" else config.features.get(section) or getattr(config, section)
        real = getattr(owner, field)
        if isinstance(real, bool) or real is None or real in ("", ()):
            continue
        read = flag.read(flag.default)
        assert (convert(flag, [read]) if flag.many else read) == real, flag.name


def test_flags_reach_their_fields() -> None:
    engine, server = parse(
        "some/model", "--tokenizer", "t", "--revision", "r", "--dtype", "half", "--load-format", "dummy",
        "--max-model-len", "8k", "--seed", "3", "--block-size", "32", "--kv-cache-memory-bytes", "512MiB",
        "--gpu-memory-utilization", "0.5", "--no-enable-prefix-caching", "--max-num-batched-tokens", "4K",
        "--max-num-seqs", "7", "--scheduling-policy", "priority", "--async-scheduling", "--device", "cpu",
        "--threads", "2", "--attention-backend", "reference", "--host", "0.0.0.0", "--port", "9", "--api-key", "a", "b",
        "--served-model-name", "x", "y", "--chat-template", "c", "--root-path", "/p", "--max-body-bytes", "1M",
        "--shutdown-timeout", "1.5", "--disable-fastapi-docs", "--uvicorn-log-level", "DEBUG",
    )  # fmt: skip
    assert engine.model == dataclasses.replace(
        EngineConfig().model,
        model="some/model", tokenizer="t", revision="r", dtype="float16", load_format="dummy",
        max_model_len=8000, seed=3,
    )  # fmt: skip
    assert engine.cache == dataclasses.replace(
        EngineConfig().cache,
        block_size=32, memory_bytes=512 * 1024**2, memory_utilization=0.5, enable_prefix_caching=False,
    )  # fmt: skip
    assert engine.scheduler == dataclasses.replace(
        EngineConfig().scheduler, max_num_batched_tokens=4096, max_num_seqs=7, policy="priority", depth=1
    )
    assert engine.device == dataclasses.replace(
        EngineConfig().device, device="cpu", threads=2, attention_backend="reference"
    )
    assert server == dataclasses.replace(
        ServerConfig(),
        host="0.0.0.0", port=9, api_keys=("a", "b"), served_model_name=("x", "y"), chat_template="c", root_path="/p",
        max_body_bytes=1024**2, shutdown_timeout_s=1.5, enable_docs=False, log_level="debug",
    )  # fmt: skip


def test_underscores_and_aliases_and_negation() -> None:
    engine, _ = parse("--max_num_seqs=5", "--memory-utilization", "0.25", "--no_async_scheduling", "--max-model-len=-1")
    assert engine.scheduler.max_num_seqs == 5
    assert engine.cache.memory_utilization == 0.25
    assert engine.scheduler.depth == 0
    assert engine.model.max_model_len is None


def test_underscores_in_values_stay() -> None:
    engine, server = parse("--model=my_org/my_model", "--served-model-name", "a_b")
    assert engine.model.model == "my_org/my_model"
    assert server.served_model_name == ("a_b",)


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "octavo.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_the_command_line_wins_over_the_file_and_that_over_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "from-env")
    monkeypatch.setenv("VLLM_MAX_STOP_STRINGS", "9")
    file = write(tmp_path, "model: m\nport: 1\nmax_num_seqs: 11\nenable-prefix-caching: false\napi-key: [k1, k2]\n")
    engine, server = parse("--config", file, "--port", "2")
    assert (engine.model.model, engine.scheduler.max_num_seqs) == ("m", 11)
    assert engine.cache.enable_prefix_caching is False
    assert (server.port, server.api_keys, server.max_stop_strings) == (2, ("k1", "k2"), 9)


def test_keys_of_an_object_one_by_one_in_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "override_generation_config.top_p: 0.5\nhf-overrides.a.b: 1\nhf-overrides.a.c_d: [2]\n")
    model = parse("--config", file)[0].model
    assert model.override_generation_config == {"top_p": 0.5}
    assert model.hf_overrides == {"a": {"b": 1, "c_d": [2]}}


def test_our_own_variable_wins_over_the_borrowed_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "ours")
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    assert parse()[1].api_keys == ("ours",)


def test_a_variable_turns_a_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, wanted in (("1", True), ("True", True), ("0", False)):
        monkeypatch.setenv("VLLM_SERVER_DEV_MODE", text)
        assert parse()[1].server_dev_mode is wanted
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "perhaps")
    with pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE: must be true or false"):
        parse()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-num-seq: 4", "unknown setting 'max-num-seq'; did you mean max-num-seqs"),
        ("port: http", "port: 'http' is not a port"),
        ("allowed-origins: a.example", "allowed-origins: 'a.example' is not an origin, such as https://"),
        ("allowed-origins: https://a.example/", "'https://a.example/' is not an origin"),
        ('allowed-origins: ["*", "https://A.example"]', "'https://A.example' is not an origin"),
        ("port: true", "port: must be one value, not True"),
        ("port: [1, 2]", "must be one value"),
        ("port:", "port: has no value"),
        ("port.a: 1", "unknown setting 'port.a'"),
        ("enable-prefix-caching: maybe", "must be true or false, not 'maybe'"),
        ("port: 1\nhost: a\nport: 2", "port is set in lines 1 and 3; remove one of them."),
        ("max-num-seqs: 1\nmax_num_seqs: 2", "max_num_seqs is set in lines 1 and 2"),
        ("gpu-memory-utilization: 0.5\nmemory-utilization: 0.4", "memory-utilization is set in lines 1 and 2"),
        ("profiler-config.a: 1\nprofiler_config: {}", "profiler_config is set in lines 1 and 2"),
        ("profiler-config: {}\nport: 1\nprofiler-config.a: 1", "profiler-config.a is set in lines 1 and 3"),
        ("dtype: int3", "'int3' is not one of auto, float32"),
        ("- a\n- b", "must hold `name: value` lines"),
        ("a: [", "is not valid YAML"),
    ],
)
def test_mistakes_in_the_file_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse("--config", write(tmp_path, text))
    assert message in str(caught.value)
    assert "octavo.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: No such file"):
        parse("--config", "nowhere.yaml")


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert parse("--config", write(tmp_path, "# nothing\n")) == parse()


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MAX_STOP_STRINGS", "some")
    with pytest.raises(ConfigError, match="environment variable VLLM_MAX_STOP_STRINGS: 'some' is not a whole number"):
        parse()


def test_two_different_models_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"given twice: 'a' and --model 'b'"):
        parse("a", "--model", "b")


def test_missing_features_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--config", write(tmp_path, "decode-context-parallel-size: 2"))
    assert "context parallelism is for prompts" in capsys.readouterr().err
    assert parse("--config", write(tmp_path, "decode-context-parallel-size: 1\nenable-eplb: false")) == parse()


def test_a_model_that_a_flag_of_many_values_took_is_missed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = serve.make_parser()

    def check(*argv: str) -> None:
        serve.refuse_swallowed_model(parser, values(parser, parser.parse_args(list(argv))))

    for model in ("smollm2", str(tmp_path)):
        with pytest.raises(SystemExit):
            check("--api-key", "secret", model)
        assert f"put the model first: octavo serve {model} --api-key" in capsys.readouterr().err
    check("smollm2", "--api-key", "secret", "other")
    check("--served-model-name", "smollm2")
    check("--api-key", "secret", "other")


@pytest.mark.parametrize("value", ["MEAN", "[1]", "{"])
def test_what_is_no_json_object_is_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("m", "--hf-overrides", value)
    assert "JSON" in capsys.readouterr().err
