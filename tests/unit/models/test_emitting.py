"""How a model is found to emit a native program."""

from __future__ import annotations

import inspect

import pytest
from toy_engine import tiny_config
from toy_models import LLAMA, model_files

from octavo.build import build_core
from octavo.models.native import Emitting, NativeDecoder, emits

MEMBERS = [name for name in vars(Emitting) if not name.startswith("_")]


class Dynamic:
    """Has what it has only when it is asked, as torch's modules have their layers: nothing finds it statically."""

    def __getattr__(self, name: str) -> int:
        if name in MEMBERS:
            return 1
        raise AttributeError(name)


def test_what_modules_keep_apart_is_found() -> None:
    assert "layers" in MEMBERS
    assert inspect.getattr_static(Dynamic(), "layers", None) is None
    assert emits(Dynamic())


@pytest.mark.parametrize("missing", MEMBERS)
def test_nothing_may_be_missing(missing: str) -> None:
    class Lacking(Dynamic):
        def __getattr__(self, name: str) -> int:
            if name == missing:
                raise AttributeError(name)
            return super().__getattr__(name)

    assert not emits(Lacking())


def test_a_model_on_a_cpu_runs_as_a_native_program() -> None:
    """On every version of Python: a protocol's `isinstance` would not find its layers from 3.12 on."""
    loop, info = build_core(tiny_config(device="cpu"), model_files(LLAMA))
    assert "in torch" not in info.kernels
    assert isinstance(loop.worker._worker.model, NativeDecoder)  # type: ignore[attr-defined]
    loop.close()
