"""How wrong, foreign and outdated flags are answered."""

from __future__ import annotations

import pytest

from octavo.cli.flags.args import add_engine_settings, add_settings
from octavo.cli.flags.environment import notices
from octavo.cli.flags.parser import OctavoParser
from octavo.cli.flags.table import ENGINE_GROUPS, POOL_GROUPS, SERVER_GROUPS, flags_of
from octavo.config.foreign import FLAGS, SHORT, Missing


def make_parser() -> OctavoParser:
    parser = OctavoParser("octavo serve")
    add_engine_settings(parser)
    add_settings(parser, SERVER_GROUPS)
    return parser


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as caught:
        make_parser().parse_args(list(argv))
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-dcp", "4"], "context parallelism is for prompts"),
        (["--decode_context_parallel_size=8"], "--decode-context-parallel-size 8: context parallelism"),
        (["--enable-eplb"], "balancing experts over ranks is not supported"),
        (["--num-speculative-tokens", "3"], "another name of --spec-tokens"),
        (["--speculative-model", "m"], "another name of --spec-model"),
        (["--data-parallel-backend", "ray"], "--distributed-executor-backend ray starts replicas"),
        (["--data-parallel-rank", "1"], "one server starts them all (--data-parallel-size)"),
        (["--headless"], "--node-rank starts the other machines"),
        (["-cc.cudagraph_mode", "x", "--tool-server", "demo"], "tools run by the server are not supported"),
        (["--hf-token", "t"], "set the variable HF_TOKEN"),
        (["--no-enable-chunked-prefill"], "raise --max-num-batched-tokens"),
    ],
)
def test_missing_features_are_refused_with_the_reason(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert message in refused(capsys, *argv)


@pytest.mark.parametrize(
    "argv",
    [
        ["-dcp", "1"],
        ["--no-enable-eplb"],
        ["--tokenizer-mode", "auto"],
        ["--data-parallel-backend", "mp"],
    ],
)
def test_neutral_values_pass_silently(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    args = make_parser().parse_args(["model", *argv, "--port", "5"])
    assert vars(args) == {"model_name": "model", "config": None, "server.port": 5}
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("word", "method"), [("none", None), ("auto", None), ("fp8", "fp8")])
def test_a_method_of_quantization(word: str, method: str | None) -> None:
    assert vars(make_parser().parse_args(["-q", word]))["model.quantization"] == method


@pytest.mark.parametrize(
    "argv",
    [["--swap-space", "4"], ["--preemption-mode=swap"], ["--disable-log-requests"], ["--enable_auto_tool_choice"],
     ["--enable-chunked-prefill"], ["-O3"], ["-O", "3"]],
)  # fmt: skip
def test_needless_flags_pass_with_one_line(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    args = make_parser().parse_args([*argv, "--port", "5"])
    assert vars(args) == {"model_name": None, "config": None, "server.port": 5}
    err = capsys.readouterr().err
    assert "has no effect" in err
    assert len(err.splitlines()) == 1


def test_a_needless_switch_does_not_swallow_the_model() -> None:
    assert make_parser().parse_args(["--enable-auto-tool-choice", "my-model"]).model_name == "my-model"


def test_unknown_flags_get_near_matches(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown flag --ctx-size; it is --max-model-len here" in refused(capsys, "--ctx-size", "4096")
    assert "requests set temperature, and --override-generation-config its default" in refused(
        capsys, "--temperature=0"
    )
    assert "unknown flag --max-num-seq; did you mean --max-num-seqs" in refused(capsys, "--max-num-seq", "3")
    assert "unexpected argument 'extra'" in refused(capsys, "model", "extra")


def test_abbreviations_are_not_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown flag --sched" in refused(capsys, "--sched", "fcfs")


def test_wrong_values_name_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert "argument --kv-cache-memory-bytes: 'lots' is not a size" in refused(
        capsys, "--kv-cache-memory-bytes", "lots"
    )


def test_no_flag_is_both_supported_and_in_the_table() -> None:
    ours = {name for flag in flags_of(ENGINE_GROUPS, SERVER_GROUPS, POOL_GROUPS) for name in (flag.name, *flag.aliases)}
    assert not ours & set(FLAGS)
    assert set(SHORT.values()) <= set(FLAGS)


@pytest.mark.parametrize("name", sorted(name for name, entry in FLAGS.items() if isinstance(entry, Missing)))
def test_every_missing_feature_says_why_in_a_sentence(capsys: pytest.CaptureFixture[str], name: str) -> None:
    message = refused(capsys, f"--{name}", "surely-not-neutral")
    assert "not s" in message
    assert "leave it out" in message


def test_help_shows_every_flag_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        make_parser().parse_args(["--help"])
    assert caught.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    for flag in flags_of(ENGINE_GROUPS, SERVER_GROUPS):
        assert f"--{flag.name}" in out
        assert f"(default: {flag.default})" in out


def test_json_flags_are_given_whole_or_key_by_key() -> None:
    words = ["--override-generation-config.temperature", "0.5", "--override_generation_config.top_k=3", "--port", "5"]
    dotted = make_parser().parse_args(words)
    whole = make_parser().parse_args(
        ["--port", "5", "--override-generation-config", '{"temperature": 0.5, "top_k": 3}']
    )
    assert vars(dotted) == vars(whole)
    deep = make_parser().parse_args(["--default-chat-template-kwargs.a_b.c", "text"])
    assert vars(deep)["server.default_chat_template_kwargs"] == {"a_b": {"c": "text"}}


def test_json_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not a JSON object" in refused(capsys, "--default-chat-template-kwargs", "[1]")
    assert "argument --override-generation-config: expected one" in refused(capsys, "--override-generation-config")


def test_one_spelling_of_json_is_as_good_as_another(capsys: pytest.CaptureFixture[str]) -> None:
    make_parser().parse_args(["--additional-config", "{ }"])
    assert "additional settings are not supported" in refused(capsys, "--additional-config", '{"x": 1}')


def test_variables_without_an_effect_are_named() -> None:
    environ = {
        "VLLM_API_KEY": "k",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_NEVER_HEARD_OF": "1",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_USE_V1": "",
        "OCTAVO_API_KEY": "k",
        "OCTAVO_APIKEY": "k",
        "OCTAVO_PORT": "9",
        "OCTAVO_CACHE": "c",
        "OCTAVO_SERVICE_HOST": "10.0.0.1",
        "OCTAVO_API_PORT": "tcp://10.0.0.1:80",
        "OCTAVO_PORT_80_TCP_ADDR": "10.0.0.1",
        "HOME": "/",
    }
    assert list(notices(environ, {"OCTAVO_API_KEY"})) == [
        "OCTAVO_APIKEY has no effect: there is no such variable; did you mean OCTAVO_API_KEY?",
        "OCTAVO_PORT has no effect: there is no such variable; docs/configuration.md lists those there are",
        "VLLM_DO_NOT_TRACK has no effect: there is no telemetry",
        "VLLM_NEVER_HEARD_OF has no effect: this server has no such setting",
    ]
