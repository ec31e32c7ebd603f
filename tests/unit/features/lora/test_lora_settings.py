"""Flags and keywords of LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from octavo.cli.flags.args import engine_from, values
from octavo.cli.serve import make_parser
from octavo.config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.features import FeatureContext
from octavo.features.lora.engine import build_engine
from octavo.features.lora.settings import LoraModule, LoraSettings


def parsed(*argv: str) -> LoraSettings:
    parser = make_parser()
    found = engine_from(values(parser, parser.parse_args(["model", *argv]))).features["lora"]
    assert isinstance(found, LoraSettings)
    return found


def test_adapters_are_named_as_pairs_or_as_json() -> None:
    made = parsed("--lora-modules", "a=/x=1", '{"name": "b", "path": "/y", "base_model_name": "c"}')
    assert made.modules() == (LoraModule("a", Path("/x=1")), LoraModule("b", Path("/y"), "c"))
    assert made.enabled
    listed = parsed("--lora-modules", '[{"name": "a", "path": "/x"}, {"name": "b", "path": "/y"}]').modules()
    assert [one.name for one in listed] == ["a", "b"]


def test_keywords_take_objects_and_survive_the_way_to_the_core() -> None:
    config = EngineConfig.of(enable_lora=True, lora_modules=[{"name": "a", "path": "/x"}, "b=/y"], max_loras=4)
    again = EngineConfig.restored(msgspec.to_builtins(config))
    for made in (config, again):
        lora = made.features["lora"]
        assert isinstance(lora, LoraSettings)
        assert [one.name for one in lora.modules()] == ["a", "b"]
        assert (lora.most_on_device, lora.highest_rank, lora.most_on_host) == (4, 64, 4)


def test_nothing_is_enabled_by_default() -> None:
    assert not parsed().enabled
    assert parsed("--lora-dir", "/x").enabled


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--max-loras", "256"),
        ("--max-lora-rank", "64"),
        ("--max-cpu-loras", "8"),
        ("--allow-runtime-lora-updating", ""),
    ],
)
def test_a_setting_without_effect_is_an_error_that_names_the_remedy(flag: str, value: str) -> None:
    """Also one that equals its default."""
    given = [flag, value] if value else [flag]
    says = rf"has no effect without adapters\. Set --enable-lora, --lora-modules or --lora-dir, or leave out {flag}\."
    with pytest.raises(ConfigError, match=says):
        parsed(*given)
    for way in (["--enable-lora"], ["--lora-dir", "/x"], ["--lora-modules", "a=/x"]):
        assert parsed(*way, *given).enabled


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"lora_modules": ["a"]}, "'a' is not NAME=PATH"),
        ({"lora_modules": ["=/x"]}, "is not NAME=PATH"),
        ({"lora_modules": ['{"name": "a"}']}, "is not NAME=PATH"),
        ({"lora_modules": ["{name: a}"]}, "is not valid JSON"),
        ({"lora_modules": [{"name": "a", "path": "/x", "rank": 3}]}, "is not NAME=PATH"),
        ({"lora_modules": ["a=/x", "a=/y"]}, "two adapters of the name 'a'"),
        ({"max_lora_rank": 512}, "max_lora_rank=512 must be at most 256"),
        ({"max_loras": 0}, "max_loras=0 must be a whole number of at least 1"),
    ],
)
def test_wrong_settings_are_errors(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineConfig.of(**settings)


def test_steps_with_adapters_can_not_be_recorded() -> None:
    LoraSettings().check_recordable()
    with pytest.raises(ConfigError, match="--record-steps can't be used with adapters"):
        LoraSettings(enable_lora=True).check_recordable()


def test_a_folder_of_adapters_must_exist(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        settings = LoraSettings(lora_dir=str(folder))
        build_engine(FeatureContext(vocab_size=9, eos_token_ids=(), load_tokenizer=Mock(), settings={"lora": settings}))

    build(tmp_path)
    with pytest.raises(ConfigError, match=f"--lora-dir {tmp_path}/none: there is no such folder"):
        build(tmp_path / "none")
