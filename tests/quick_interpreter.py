"""Triton's interpreter without what it repeats, which takes more than half of the time of tests with small kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def quicken() -> None:
    """Replace parts of the interpreter, if Triton is there; results stay the same."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    patch_once(interpreter)
    know_dtypes(interpreter)
    know_shapes()


def patch_once(interpreter: Any) -> None:
    """Patch `triton.language` once for each module, and leave arguments where they are.

    The interpreter patches it before a kernel runs and for every call of a function within the kernel, and restores it
    afterwards, which takes a millisecond. It copies arguments to the host and back, where they are already.
    """
    patch = interpreter._patch_lang
    nothing = SimpleNamespace(restore=lambda: None)
    patched: set[int] = set()

    def patch_once(function: Any) -> Any:
        module = id(function.__globals__)
        if module not in patched:
            patch(function)
            patched.add(module)
        return nothing

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor._init_args_hst = lambda self, args, keywords: (args, keywords)
    interpreter.GridExecutor._restore_args_dev = lambda *_: None


def know_dtypes(interpreter: Any) -> None:
    """Look up numpy's dtype for each of Triton's once; the interpreter makes a table of all of them each time."""
    look_up = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def of(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = look_up(kind)
        return known[name]

    interpreter._get_np_dtype = of


def know_shapes() -> None:
    """Check each shape of blocks once, and make one tuple of constants for all tensors that have it."""
    from triton.language import core

    make_type, make_tensor, compare = core.block_type.__init__, core.tensor.__init__, core.tuple.__eq__
    types: dict[tuple[str, tuple[int, ...]], Any] = {}
    tensors: dict[str, Any] = {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple(getattr(size, "value", size) for size in shape)
        known = types.get(key)
        if known is None:
            make_type(self, element_ty, shape)
            types[key] = self
        else:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = known.shape, known.numel, known.name

    def init_tensor(self: Any, handle: Any, kind: Any) -> None:
        name = kind.name
        known = tensors.get(name)
        if known is None:
            make_tensor(self, handle, kind)
            tensors[name] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, kind, kind.scalar
            self.shape, self.numel = known

    def equal(self: Any, other: Any) -> Any:
        return core.constexpr(True) if other is self else compare(self, other)

    core.block_type.__init__, core.tensor.__init__, core.tuple.__eq__ = init_type, init_tensor, equal
