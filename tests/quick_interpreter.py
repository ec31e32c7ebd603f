"""Triton's interpreter without what it repeats, which takes more than half of the time of tests with small kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

_MOST_BLOCKS = 2048
"""How many blocks of one number are kept."""


def quicken() -> None:
    """Replace parts of the interpreter, if Triton is there; results stay the same."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    patch_once(interpreter)
    call_directly(interpreter)
    leave_unread(interpreter)
    know_dtypes(interpreter)
    know_shapes()
    know_operands()
    know_stretches()


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


def call_directly(interpreter: Any) -> None:
    """Call what the language's functions wrap, without looking for the keyword that the interpreter gives itself."""
    from triton.language import core

    @core.builtin
    def example() -> None: ...

    wrapper, semantic = example.__code__, interpreter.interpreter_semantic

    def patch(target: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        run = member.__wrapped__ if getattr(member, "__code__", None) is wrapper else member
        scope.set_attr(target, name, lambda *args, _semantic=None, **given: run(*args, **given, _semantic=semantic))

    interpreter._patch_attr = patch


def leave_unread(interpreter: Any) -> None:
    """Leave out the second computation of integers, in 64 bits: it is to find overflow, and nothing reads the finding
    unless the interpreter debugs."""
    if not interpreter.interpreter_builder.options.debug:
        type(interpreter.interpreter_semantic).binary_op_sanitize_overflow_impl = lambda *_: None


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


def know_operands() -> None:
    """Check and choose once what two types of operands become, and make a number that meets blocks a block once."""
    from triton.language import core, semantic

    match, unwrap, same = (
        semantic.TritonSemantic.binary_op_type_checking_impl,
        core._unwrap_if_constexpr,
        core.dtype.__eq__,
    )
    common: dict[tuple[Any, ...], Any] = {}
    blocks: dict[tuple[Any, ...], Any] = {}
    numbers, tensor = (int, float, bool), core.tensor

    def matched(self: Any, lhs: Any, rhs: Any, *flags: Any, **options: Any) -> Any:
        first, second = (lhs, rhs) if isinstance(lhs, tensor) else (rhs, lhs)
        if options or not isinstance(first, tensor):
            return match(self, lhs, rhs, *flags, **options)
        if isinstance(second, tensor):
            return of_tensors(self, lhs, rhs, flags)
        if type(second) in numbers and not first.dtype.is_ptr():
            return with_number(self, lhs, rhs, flags)
        return match(self, lhs, rhs, *flags)

    def of_tensors(self: Any, lhs: Any, rhs: Any, flags: tuple[Any, ...]) -> Any:
        key = lhs.type.name, rhs.type.name, flags
        if key not in common:
            made = match(self, lhs, rhs, *flags)
            common[key] = made[0].dtype if made[0].dtype.name == made[1].dtype.name else None
            return made
        kind = common[key]
        if kind is not None:
            lhs = lhs if lhs.dtype.name == kind.name else self.cast(lhs, kind)
            rhs = rhs if rhs.dtype.name == kind.name else self.cast(rhs, kind)
        return self.broadcast_impl_value(lhs, rhs)

    def with_number(self: Any, lhs: Any, rhs: Any, flags: tuple[Any, ...]) -> Any:
        left = isinstance(lhs, tensor)
        operand, number = (lhs, rhs) if left else (rhs, lhs)
        key = operand.type.name, type(number), number, flags
        known = blocks.get(key)
        if known is None:
            made = match(self, lhs, rhs, *flags)
            if made[not left] is operand:
                if len(blocks) == _MOST_BLOCKS:
                    blocks.clear()
                made[left].handle.data.flags.writeable = False
                blocks[key] = made[left]
            return made
        return (lhs, known) if left else (known, rhs)

    def unwrapped(value: Any) -> Any:
        return value if type(value) is tensor else unwrap(value)

    def equal(self: Any, other: Any) -> bool:
        return self.name == other.name if isinstance(other, core.dtype) else same(self, other)

    semantic.TritonSemantic.binary_op_type_checking_impl = matched
    core._unwrap_if_constexpr, core.dtype.__eq__ = unwrapped, equal


def know_stretches() -> None:
    """Find once what two types of operands are stretched to."""
    from triton.language import core, semantic

    stretch = semantic.TritonSemantic.broadcast_impl_value
    known: dict[tuple[str, str], tuple[Any, Any]] = {}

    def one_to(self: Any, operand: Any, kind: Any) -> Any:
        if kind is None:
            return operand
        if operand.type.is_block():
            return core.tensor(self.builder.create_broadcast(operand.handle, kind.shape), kind)
        return core.tensor(self.builder.create_splat(kind, operand.handle), kind)

    def stretched(self: Any, lhs: Any, rhs: Any) -> Any:
        key = lhs.type.name, rhs.type.name
        kinds = known.get(key)
        if kinds is not None:
            return one_to(self, lhs, kinds[0]), one_to(self, rhs, kinds[1])
        made = stretch(self, lhs, rhs)
        if not lhs.type.is_block() or not rhs.type.is_block() or len(lhs.shape) == len(rhs.shape):
            first, second = (None if new is old else new.type for new, old in zip(made, (lhs, rhs), strict=True))
            known[key] = first, second
        return made

    semantic.TritonSemantic.broadcast_impl_value = stretched
