"""An activation with parameters of its own: its curve, and parameters that a checkpoint lacks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.activations import XIELUActivation

from octavo.nn.xielu import Xielu

X = torch.cat([torch.linspace(-30, 6, 301), torch.tensor([0.0, -1e-7, 1e-7, -2e-6])])


def placed(names: list[str], tensors: dict[str, Tensor]) -> Xielu:
    layer = Xielu("act_fn", torch.device("cpu"))
    assert [want.name for want in layer.wanted()] == [f"act_fn.{name}" for name in names]
    layer.place([tensors.get(name) for name in names])
    return layer


@pytest.mark.parametrize("left_out", [(), ("beta", "eps")])
def test_the_curve_is_that_of_transformers(left_out: tuple[str, ...]) -> None:
    theirs = XIELUActivation(alpha_p_init=0.7, alpha_n_init=1.3, dtype=torch.float32)
    tensors = {name: tensor for name, tensor in theirs.state_dict().items() if name not in left_out}
    layer = placed(["alpha_p", "alpha_n", "beta", "eps"], tensors)
    with torch.no_grad():
        torch.testing.assert_close(layer(X), theirs(X), rtol=1e-6, atol=1e-6)
    assert layer(X.bfloat16()).dtype == torch.bfloat16


def test_stated_parameters_need_no_tensors() -> None:
    layer = Xielu("act_fn", torch.device("cpu"), (0.0, 0.0, 0.5, -1e-6))
    assert layer.wanted() == []
    layer.place([])
    softplus = torch.log(torch.tensor(2.0))
    torch.testing.assert_close(layer.curve, torch.tensor([softplus, 0.5 + softplus, 0.5, -1e-6]))
