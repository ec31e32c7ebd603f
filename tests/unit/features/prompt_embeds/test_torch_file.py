"""Tensors out of torch's own files, and nothing else out of anything else."""

from __future__ import annotations

import io
import pickle
import random
import zipfile
from typing import Any

import pytest
import torch

from octavo.features.prompt_embeds.torch_file import NotATensorError, read_tensor

X = torch.randn(6, 10)


def saved(value: Any, **how: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **how)
    return file.getvalue()


def archive(compression: int = zipfile.ZIP_STORED, **parts: bytes) -> bytes:
    """X's file with other parts in it."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(X))) as old, zipfile.ZipFile(file, "w", compression) as new:
        names = {name.partition("/")[2]: old.read(name) for name in old.namelist()}
        for name, data in (names | {name.replace("_", "."): data for name, data in parts.items()}).items():
            new.writestr(f"x/{name}", data)
    return file.getvalue()


@pytest.mark.parametrize(
    "tensor",
    [
        X,
        X.half(),
        X.bfloat16(),
        X.t(),
        X[1:, ::3],
        X[None],
        X[:, None, 4:6],
        X[3],
        X[:0],
        torch.tensor(5.0),
        torch.nn.Parameter(X),
        X.clone().requires_grad_(),
        torch.randn(3000, 40)[100:2000, 3:],
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}",
)
def test_it_is_the_tensor_that_was_saved(tensor: torch.Tensor) -> None:
    found = read_tensor(saved(tensor))
    assert (found.dtype, found.shape) == (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    assert found.data == bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


class Evil:
    def __reduce__(self) -> Any:
        return print, ("this must not run",)


@pytest.mark.parametrize(
    ("file", "says"),
    [
        (b"", "no file of torch.save"),
        (b"hello", "no file of torch.save"),
        (saved(X)[:500], "no file of torch.save"),
        (saved(X, _use_new_zipfile_serialization=False), "no file of torch.save"),
        (saved({"x": X}), "save the tensor itself"),
        (saved([X]), "save the tensor itself"),
        (saved("text"), "holds str, and no tensor"),
        (saved(X.double()), "tensor of torch.DoubleStorage; convert it to float32"),
        (saved(X.long()), "tensor of torch.LongStorage"),
        (saved(X.to_sparse()), "to_dense"),
        (saved(X.expand(5, 6, 10)), "more elements than its file"),
        (saved(Evil()), "print"),
        (archive(byteorder=b"big"), "another byte order"),
        (archive(data_pkl=pickle.dumps(Evil(), 2)), "print"),
        (archive(data_pkl=pickle.dumps(list(range(99999)), 2)), "holds more than a tensor"),
        (archive(data_pkl=b"\x80\x02r\xff\xff\xff\x7f."), "no file of torch.save"),
        (archive(zipfile.ZIP_DEFLATED), "compressed"),
        (archive(**{"data/0": b"\0" * 100}), "more elements than its file"),
        (archive(**{"data/0": b""}), "more elements than its file"),
    ],
)
def test_anything_else_is_refused_with_the_reason(file: bytes, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NotATensorError, match=says):
        read_tensor(file)
    assert capsys.readouterr().out == ""


def test_a_file_that_was_damaged_anywhere_is_read_or_refused() -> None:
    file, rng = saved(X), random.Random(3)
    for _ in range(400):
        damaged = bytearray(file)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            assert len(read_tensor(bytes(damaged)).data) < len(file)
        except NotATensorError:
            continue


def test_shapes_that_reach_beyond_the_file_are_refused() -> None:
    with zipfile.ZipFile(io.BytesIO(saved(X))) as parts:
        pickled = parts.read(next(name for name in parts.namelist() if name.endswith("data.pkl")))
    assert pickled.count(b"K\x06K\n\x86") == 1  # the shape, (6, 10)
    for shape in (b"K\x07K\n\x86", b"J\xff\xff\xff\x7fK\n\x86", b"J\xff\xff\xff\xffK\n\x86", b"K\x06K\n\x86\x86"):
        with pytest.raises(NotATensorError):
            read_tensor(archive(data_pkl=pickled.replace(b"K\x06K\n\x86", shape)))
