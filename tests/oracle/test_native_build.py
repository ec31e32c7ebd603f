"""The kernel is built once, safely, from what the machine has; without it the engine goes on and says so once."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest
import torch

from octavo.core.errors import ConfigError
from octavo.native import build as native_build
from octavo.native import isa
from octavo.native.build import NativeBuildError
from octavo.nn.attention import select
from octavo.nn.attention.base import AttentionSpec, BackendRequest

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=32, scale=0.2)


def request(dtype: torch.dtype, spec: AttentionSpec = SPEC, **options) -> BackendRequest:
    return BackendRequest(torch.device("cpu"), dtype, spec, **options)


has_compiler = pytest.mark.skipif(
    not any(map(shutil.which, native_build.COMPILERS)), reason="this machine has no C++ compiler"
)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """An empty cache folder, no memory of an earlier build, and sources that take no time: the rest of the suite runs
    on what the real ones become.
    """
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("OCTAVO_KERNEL_CACHE", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    sources = tmp_path / "sources"
    sources.mkdir()
    for source in native_build.SOURCES.glob("*.cpp"):
        (sources / source.name).write_text("")
    (sources / "program.cpp").write_text('extern "C" int octavo_self_test() { return 0; }\n')
    monkeypatch.setattr(native_build, "SOURCES", sources)
    monkeypatch.setattr(native_build, "_built", {})
    kept = (native_build._load_separate, select._advise)
    for cached in kept:
        cached.cache_clear()
    yield tmp_path
    for cached in kept:
        cached.cache_clear()


@pytest.fixture
def no_compiler(fresh, monkeypatch):
    monkeypatch.setenv("PATH", str(fresh))
    return fresh


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_without_a_compiler_torch_serves_and_one_line_says_how_to_be_faster(no_compiler, caplog):
    with caplog.at_level(logging.INFO, logger="octavo"):
        backends = [select.select(None, request(torch.bfloat16)).name for _ in range(3)]
    assert backends == ["torch"] * 3
    assert len(caplog.records) == 1
    assert "no C++ compiler found" in caplog.text
    assert "g++" in caplog.text


def test_a_forced_backend_that_cannot_be_had_is_refused_with_reasons(no_compiler):
    with pytest.raises(ConfigError, match=r"'native' can't be used here.*native: could not be compiled.*torch: usable"):
        select.select("native", request(torch.bfloat16))
    with pytest.raises(ConfigError, match=r"no attention backend 'flash'.*native: .*torch: usable;.*reference: usable"):
        select.select("flash", request(torch.bfloat16))
    with pytest.raises(ConfigError, match=r"'torch' can't be used here.*not in torch.float64.*reference: usable"):
        select.select("torch", request(torch.float64))


def test_a_forced_backend_costs_no_build_of_another(no_compiler, caplog):
    with caplog.at_level(logging.INFO, logger="octavo"):
        assert select.select("torch", request(torch.float32)).name == "torch"
    assert not caplog.records


@pytest.mark.parametrize(
    ("dtype", "head_dim", "block_size", "expected"),
    [
        (torch.float16, 32, 16, "torch"),
        (torch.bfloat16, 40, 16, "torch"),
        (torch.bfloat16, 32, 8, "torch"),
        (torch.float64, 32, 16, "reference"),
    ],
    ids=str,
)
def test_what_the_kernel_does_not_know_goes_to_the_next(dtype, head_dim, block_size, expected):
    spec = AttentionSpec(4, 2, head_dim, 0.2)
    assert select.select(None, request(dtype, spec, block_size=block_size)).name == expected


def test_a_compiler_that_fails_is_named_with_its_message(no_compiler):
    script(
        no_compiler / "g++", '[ "$1" = --version ] && echo fake 1.0 && exit 0; echo "x.h: error: no room" >&2; exit 3'
    )
    with pytest.raises(NativeBuildError, match=r"g\+\+ ended with status 3: x.h: error: no room"):
        native_build.load_library()
    assert not list((no_compiler / "cache").rglob("*.so"))


def test_a_library_that_computes_nonsense_is_not_kept(no_compiler):
    """The self-test runs in a process of its own, so that not even a crash of it does harm."""
    body = '[ "$1" = --version ] && echo fake 1.0 && exit 0; for last; do :; done; echo garbage > "$last"'
    script(no_compiler / "g++", body)
    with pytest.raises(NativeBuildError, match="ended with status"):
        native_build.load_library()
    assert not list((no_compiler / "cache").rglob("*.so"))


@has_compiler
def test_the_next_compiler_is_tried(fresh, monkeypatch):
    """Only the first is broken, and $CXX goes before all others."""
    broken = fresh / "broken"
    script(broken, "echo broken >&2; exit 1")
    monkeypatch.setenv("CXX", str(broken))
    native_build.load_library()
    assert len(list((fresh / "cache").rglob("*.so"))) == 1


@has_compiler
def test_a_second_load_compiles_nothing(fresh, monkeypatch):
    native_build.load_library()
    native_build._built.clear()
    monkeypatch.setattr(native_build, "_compile_unit", lambda *_: pytest.fail("compiled again"))
    native_build.load_library()


@has_compiler
@pytest.mark.parametrize("kept", [0, 1000, -1], ids=["nothing", "the beginning", "all but a byte"])
def test_a_library_that_was_cut_short_is_compiled_again(fresh, kept):
    """By a power failure. To load it would fail or, if the loader reads behind its end, kill the process."""
    native_build.load_library()
    (library,) = (fresh / "cache").rglob("*.so")
    whole = library.read_bytes()
    library.unlink()  # it is mapped
    library.write_bytes(whole[:kept])
    native_build._built.clear()
    native_build.load_library()
    assert library.read_bytes() == whole
    assert list((fresh / "cache").rglob("*.so")) == [library]  # and none for a lesser instruction set


@pytest.fixture
def separate(fresh):
    """Sources of three libraries of their own, each with a function of its number."""
    for number, name in enumerate(native_build.SEPARATE):
        (fresh / "sources" / f"{name}.cpp").write_text(f'extern "C" int number() {{ return {number}; }}\n')
    return fresh


def compiled_libraries(folder: Path) -> set[str]:
    """The separate ones among them."""
    return {path.stem.rpartition("-")[2] for path in (folder / "cache").rglob("*.so")} & {*native_build.SEPARATE}


@has_compiler
def test_only_what_is_needed_is_compiled_and_once(separate, monkeypatch):
    assert not hasattr(native_build.load_library("auto", ["words"]), "number")
    assert compiled_libraries(separate) == {"words"}
    numbers = [native_build.load_separate(name).number() for name in ("words", "blocks")]
    assert numbers == [native_build.SEPARATE.index(name) for name in ("words", "blocks")]
    assert compiled_libraries(separate) == {"words", "blocks"}
    native_build._built.clear()
    native_build._load_separate.cache_clear()
    monkeypatch.setattr(native_build, "_compile_unit", lambda *_: pytest.fail("compiled again"))
    native_build.load_library("auto", ["blocks", "words"])
    assert native_build.load_separate("blocks").number() == numbers[1]


@has_compiler
def test_a_folder_that_cannot_be_written_any_more_keeps_what_it_has(separate, monkeypatch):
    """What lacks lies elsewhere, and only that is compiled again."""
    native_build.load_library("auto", ["words"])
    native_build._built.clear()
    native_build._load_separate.cache_clear()
    elsewhere = separate / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setattr(native_build, "_writable", lambda _: elsewhere)
    native_build.load_library("auto", ["words", "blocks"])
    assert compiled_libraries(separate) == {"words"}
    (library,) = elsewhere.rglob("*.so")
    assert library.stem.endswith("-blocks")


@has_compiler
def test_a_library_that_cannot_be_compiled_is_told(separate):
    (separate / "sources" / "blocks.cpp").write_text("#error no such thing\n")
    native_build.load_library("auto", ["words"])
    with pytest.raises(NativeBuildError, match="no such thing"):
        native_build.load_separate("blocks")


@has_compiler
def test_changed_sources_get_a_library_of_their_own(fresh):
    native_build.load_library()
    with (fresh / "sources" / "program.cpp").open("a") as source:
        source.write("// changed\n")
    native_build._built.clear()
    native_build.load_library()
    assert len(list((fresh / "cache").rglob("*.so"))) == 2


def _build_in_process(folder: Path) -> int:
    os.environ["OCTAVO_CACHE"] = str(folder / "cache")
    native_build.SOURCES = folder / "sources"
    return native_build.load_library().octavo_self_test()


@has_compiler
def test_builders_at_the_same_time_all_succeed(fresh):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.map(_build_in_process, [fresh] * 2, chunksize=1) == [0, 0]
    assert len(list((fresh / "cache").rglob("*"))) == 2, "a folder and one library, no leftovers"


@has_compiler
def test_a_cache_folder_that_cannot_be_made_is_no_obstacle(fresh, monkeypatch):
    (fresh / "file").write_text("in the way")
    monkeypatch.setenv("OCTAVO_CACHE", str(fresh / "file" / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(fresh))
    assert native_build.load_library().octavo_self_test() == 0
    (library,) = fresh.rglob("*.so")
    assert library.parent.stat().st_mode & 0o777 == 0o700
    native_build._built.clear()
    monkeypatch.setattr(native_build, "_compile_unit", lambda *_: pytest.fail("compiled again"))
    native_build.load_library()


@has_compiler
def test_a_full_cache_disk_is_no_obstacle(fresh, monkeypatch):
    full = shutil.disk_usage(fresh)._replace(free=native_build._ROOM - 1)
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full if path.is_relative_to(fresh / "cache") else real(path))
    monkeypatch.setattr(tempfile, "tempdir", str(fresh))
    assert native_build.load_library().octavo_self_test() == 0
    (library,) = fresh.rglob("*.so")
    assert not library.is_relative_to(fresh / "cache")


def test_what_another_user_may_have_put_there_is_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    usual = native_build._own_temporary()
    assert native_build._own_temporary() == usual
    usual.chmod(0o777)
    assert native_build._own_temporary() != usual
    usual.rmdir()
    usual.symlink_to(tmp_path)
    assert native_build._own_temporary() != usual


@has_compiler
def test_what_killed_compilations_left_is_removed_once_it_is_old(fresh):
    folder = fresh / "cache" / "native"
    for name, age_s in (("build-old", 3600), ("build-now", 0)):
        (folder / name).mkdir(parents=True)
        os.utime(folder / name, (time.time() - age_s,) * 2)
    native_build.load_library()
    assert {path.name for path in folder.glob("build-*")} == {"build-now"}


def test_an_instruction_set_that_cannot_be_had_is_refused(monkeypatch):
    monkeypatch.setattr(native_build, "usable", lambda: [isa.LEVELS[-1]])
    monkeypatch.setattr(native_build, "_built", {})
    with pytest.raises(ConfigError, match=r"--cpu-isa avx512: .*this processor has portable"):
        select.select(None, request(torch.float32, isa="avx512"))
