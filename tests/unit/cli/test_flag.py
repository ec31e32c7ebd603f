"""What a field of a settings dataclass says is its flag."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import pytest

from octavo.config import EngineConfig, ServerConfig
from octavo.core import parsing, quantities
from octavo.core.flag import Flag, declared, setting


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Toy:
    mode: Literal["slow", "fast"] = setting("slow", "how fast")
    limit_bytes: int = setting(32 << 20, "how much", flag="limit", read=quantities.size, aliases=("-l",))
    quiet: bool = setting(False, "say less")
    names: tuple[str, ...] = setting(("a", "b"), "who")
    paths: tuple[str, ...] = setting((), "where", read=parsing.paths, many=False)
    more: dict[str, Any] = setting({}, "the rest")
    wait_s: float = setting(10.0, "how long", read=quantities.seconds)
    most: int | None = setting(None, "at most", shown="no limit", read=quantities.count, metavar="N", env="OCTAVO_MOST")


FLAGS = declared("toy", Toy)


def test_names_come_from_the_fields() -> None:
    assert [flag.name for flag in FLAGS.values()] == [
        "mode", "limit", "quiet", "names", "paths", "more", "wait-s", "most",
    ]  # fmt: skip
    assert FLAGS["limit_bytes"].target == "toy.limit_bytes"
    assert FLAGS["limit_bytes"].spelled() == ("--limit", "-l")
    assert FLAGS["wait_s"].keyword == "wait_s"


def test_defaults_are_shown_as_users_write_them() -> None:
    shown = {name: flag.default for name, flag in FLAGS.items()}
    assert shown == {
        "mode": "slow", "limit_bytes": "32MiB", "quiet": "off", "names": "a b", "paths": "none", "more": "{}",
        "wait_s": "10", "most": "no limit",
    }  # fmt: skip


def test_types_make_choices_switches_lists_and_objects() -> None:
    assert FLAGS["mode"].choices == ("slow", "fast")
    assert [name for name, flag in FLAGS.items() if flag.choices] == ["mode"]
    assert [name for name, flag in FLAGS.items() if flag.switch] == ["quiet"]
    assert [name for name, flag in FLAGS.items() if flag.many] == ["names"]
    assert [name for name, flag in FLAGS.items() if flag.dotted] == ["more"]
    assert FLAGS["more"].read('{"a": 1}') == {"a": 1}


def test_the_field_keeps_its_default() -> None:
    assert Toy() == Toy(mode="slow", limit_bytes=32 << 20, names=("a", "b"), more={}, wait_s=10.0, most=None)
    assert Toy().more is not Toy().more


@pytest.mark.parametrize("flag", [*declared("server", ServerConfig).values()], ids=lambda flag: flag.name)
def test_a_default_that_is_a_value_is_written_once(flag: Flag) -> None:
    """Words in place of a default are for what its value does not say."""
    default = getattr(ServerConfig(), flag.target.removeprefix("server."))
    if not isinstance(default, bool) and default not in (None, "", ()):
        read = flag.read(flag.default)
        value = flag.convert([read]) if flag.convert else (read,) if flag.many else read
        assert value == default


def test_keywords_are_unique_over_all_sections() -> None:
    config = EngineConfig()
    sections = {
        name: getattr(config, name) for name in ("model", "cache", "scheduler", "device", "parallel")
    } | config.features
    names = [
        word
        for section, own in sections.items()
        for name, flag in declared(section, type(own)).items()
        for word in {name, flag.keyword}
    ]
    assert len(names) == len(set(names))
