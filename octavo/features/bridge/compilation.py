"""Compile the modules of transformers with `torch.compile`, around Octavo's attention and linear layers."""

from __future__ import annotations

from torch import nn

from octavo.features.bridge.layers import Multiplying
from octavo.nn.attention.layer import PagedAttention

_BACKEND = "inductor"


def compile_body(body: nn.Module) -> None:
    """Compile a base model in place; the first steps then take seconds longer.

    Octavo's layers stay as they are, since they are kernels or native programs already: torch compiles what is between
    them, such as norms, rotary embeddings, activations and residual sums. Numbers of tokens are dynamic, and layers of
    one kind share their code.
    """
    import torch._dynamo  # takes a second, which only compiled models pay

    for module in body.modules():
        if isinstance(module, Multiplying | PagedAttention):
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
    # A layer may differ from the one before in constants, such as its window.
    layers = sum(isinstance(module, PagedAttention) for module in body.modules())
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 2 * layers)
    body.compile(dynamic=True, backend=_BACKEND)
