"""The models of `octavo serve A B` and of `--models FILE`, with the settings of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.cli import serve
from octavo.cli.flags.args import values
from octavo.cli.serve import make_parser
from octavo.cli.serve_models import entries
from octavo.core.errors import ConfigError
from octavo.pool.settings import ModelEntry, PoolConfig, of_child


def made(*words: str) -> list[ModelEntry]:
    parser = make_parser()
    args = parser.parse_args(list(words))
    args.model_name = None
    return entries(parser, args.model_names, values(parser, args))


def written(folder: Path, text: str) -> str:
    path = folder / "models.yaml"
    path.write_text(text)
    return str(path)


def test_models_on_the_command_line_share_its_flags() -> None:
    one, two = made("smollm2", "minilm", "--max-num-seqs", "4", "--max-loaded-models", "2")
    assert [one.names, two.names] == [("smollm2",), ("minilm",)]
    for entry in (one, two):
        assert entry.engine.scheduler.max_num_seqs == 4
        assert entry.engine.cache.models_on_device == 2
        assert not entry.engine.model.enable_sleep_mode


def test_a_file_gives_each_model_a_name_and_settings(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
        chat:
          model: smollm2
          max_model_len: 2k
          served-model-name: [assistant, gpt]
          models-on-device: 3
        embed: minilm
        """,
    )
    chat, embed = made("--models", path, "--max-model-len", "1k")
    assert chat.names == ("chat", "assistant", "gpt")
    assert (chat.engine.model.model, chat.engine.model.max_model_len) == ("smollm2", 2000)
    assert (embed.engine.model.model, embed.engine.model.max_model_len) == ("minilm", 1000)
    assert (chat.engine.cache.models_on_device, embed.engine.cache.models_on_device) == (3, 1)
    assert of_child(chat, "/s", "/j").served_model_name == chat.names


@pytest.mark.features("lora")
def test_adapters_of_the_settings_are_names(tmp_path: Path) -> None:
    path = written(tmp_path, "a: {model: smollm2, lora-modules: [poems=/p]}")
    assert made("--models", path)[0].added == ("poems",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must hold a name for each model"),
        ("[a]", "must hold a name for each model"),
        ("a: smollm2\na: minilm", "a is there twice"),
        ("a: {max-model-len: 1k}", "a names no model"),
        ("a: {model: smollm2, port: 1}", "port holds for the whole server"),
        ("a: {model: smollm2, max-loaded-models: 1}", "max-loaded-models holds for the whole server"),
        ("a: {model: smollm2, max-len: 1}", "unknown setting 'max-len'"),
        ("a: {model: smollm2, max-model-len: x}", "a: max-model-len"),
        ("a: [1]", "must hold `name: value` lines"),
        ("a: smollm2\nb: {model: minilm, served-model-name: a}", "a names both a and b"),
        ("a: ./not-there", "./not-there is not a folder or file"),
        ("a: {model: smollm2, nnodes: 2}", "--nnodes 2"),
        ("{", "is not valid YAML"),
    ],
)
def test_a_file_that_is_wrong_says_where(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made("--models", written(tmp_path, text))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["smollm2", "smollm2"], "smollm2 is given twice"),
        (["smollm2", "minilm", "--served-model-name", "x"], "--served-model-name would name all"),
        (["smollm2", "minilm", "--model", "x"], "--model names one model"),
        (["smollm2", "minilm", "--api-server-count", "2"], "--api-server-count 2 is for one model"),
        (["smollm2", "minilm", "--skip-model-name-validation"], "--skip-model-name-validation"),
        (["smollm2", "minilm", "--record-steps", "f"], "--record-steps can't be one file"),
        (
            ["smollm2", "minilm", "--max-loaded-models", "2", "--gpu-memory-utilization", "0.6"],
            "together they take up to 1.2 of the memory",
        ),
        (["--models", "/not/there.yaml"], "--models /not/there.yaml: No such file"),
    ],
)
def test_settings_that_several_models_can_t_share_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made(*words)
    assert said in str(caught.value)


def test_a_setting_of_several_models_is_refused_for_one() -> None:
    with pytest.raises(ConfigError, match=r"--min-model-turn is for several models, and one is given"):
        serve.run(["smollm2", "--min-model-turn", "1"])


def test_a_process_gets_nothing_that_the_front_has_done() -> None:
    words = ["smollm2", "minilm", "--api-key", "K", "--allowed-origins", "*", "--port", "1", "--root-path", "/x"]
    child = of_child(made(*words)[0], "/socket", "/jobs")
    assert (child.api_keys, child.allowed_origins, child.uds, child.jobs_dir) == ((), (), "/socket", "/jobs")
    assert child.root_path == "/x"


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (PoolConfig(model_eviction="stop", max_sleeping_models=2), "--max-sleeping-models 2"),
        (PoolConfig(model_eviction="sleep", max_sleeping_models=0), "--model-eviction sleep"),
    ],
    ids=["stop", "sleep"],
)
def test_models_that_are_to_sleep_and_must_not(config: PoolConfig, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        config.check()


def test_models_that_never_sleep() -> None:
    for config in (PoolConfig(), PoolConfig(model_eviction="stop"), PoolConfig(max_sleeping_models=0)):
        config.check()
