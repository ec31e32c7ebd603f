"""Which instruction sets are taken: what the processor has, less what the system or the compiler refuses."""

from __future__ import annotations

import platform
from types import SimpleNamespace

import pytest

from octavo.native import build as native_build
from octavo.native import isa
from octavo.native.build import NativeBuildError

AMX, NEXT = isa.LEVELS[:2]


@pytest.fixture
def system(monkeypatch):
    """A processor that has all there is; `system.answer` is what the kernel says to who asks for tiles."""
    asked = SimpleNamespace(answer=0, calls=[])

    def syscall(*arguments):
        asked.calls.append([argument.value for argument in arguments])
        return asked.answer

    flags = frozenset().union(*(level.cpu_flags for level in isa.LEVELS))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(isa, "_cpu_flags", lambda: flags)
    monkeypatch.setattr(isa.ctypes, "CDLL", lambda _: SimpleNamespace(syscall=syscall))
    isa._tiles_granted.cache_clear()
    yield asked
    isa._tiles_granted.cache_clear()


def test_the_system_is_asked_for_tiles_once(system):
    assert [isa.usable(), isa.usable()] == [list(isa.LEVELS)] * 2
    assert system.calls == [[158, 0x1023, 18]]


def test_without_permission_the_next_level_is_the_best(system):
    system.answer = -1
    assert isa.usable() == list(isa.LEVELS[1:])


def test_a_processor_without_tiles_is_not_asked_about(system, monkeypatch):
    monkeypatch.setattr(isa, "_cpu_flags", lambda: NEXT.cpu_flags)
    assert isa.usable()[0] is NEXT
    assert not system.calls


def test_an_instruction_set_that_the_system_refuses_is_told_from_an_unknown_one(system, monkeypatch):
    system.answer = -1
    monkeypatch.setattr(native_build, "_built", {})
    with pytest.raises(NativeBuildError, match=r"'amx_bf16' can't be used: this processor has avx512_bf16, "):
        native_build.load_library(AMX.name)


def test_a_compiler_too_old_for_it_compiles_the_next_level(monkeypatch, tmp_path):
    compiler = tmp_path / "g++"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo old 1.0 && exit 0\n'
        'case "$*" in *-mamx-tile*) echo "error: unrecognized option -mamx-tile" >&2; exit 1;; esac\n'
        'for last; do :; done; echo compiled > "$last"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setattr(native_build, "_SELF_TEST", "pass")
    monkeypatch.setattr(native_build.ctypes, "CDLL", lambda path: path)
    built = native_build._build([AMX, NEXT], [str(compiler)], tmp_path / "cache", ())
    assert built.path.name.startswith(f"octavo-{NEXT.name}-")


def test_the_advice_is_for_what_the_processor_multiplies_fastest():
    advised = {
        (level, activations): isa.activation_advice(level, activations)
        for level in isa.NAMES
        for activations in ("int16", "int8", "bfloat16")
    }
    given = {key: words.split()[1] for key, words in advised.items() if words}
    with_tiles = dict.fromkeys([("amx_bf16", "int16"), ("amx_bf16", "int8")], "bfloat16")
    as_floats = [(level, "bfloat16") for level in ("avx512_vnni", "avx512", "avx2", "portable")]
    assert given == with_tiles | dict.fromkeys(as_floats, "int16")
