"""What `--batch-invariant` refuses: what computes other bits for a request with others beside it."""

from __future__ import annotations

import torch

from octavo.config import ParallelConfig
from octavo.core.errors import ConfigError
from octavo.models.decoder import CausalLM
from octavo.models.model import Model
from octavo.nn.state import StateCache

_FLAG = "--batch-invariant"


def check_ranks(parallel: ParallelConfig) -> None:
    """Refuse ranks that compute a model together: the order of their sums depends on the size of a step.

    Raises:
        ConfigError: there are some.
    """
    for flag, value in (
        ("--tensor-parallel-size", parallel.tensor_parallel_size),
        ("--prefill-context-parallel-size", parallel.prefill_context_parallel_size),
    ):
        if value > 1:
            raise ConfigError(f"{_FLAG} is for models on one device, and {flag} is {value}. Leave one of them out.")
    if parallel.divides_requests or parallel.enable_dbo:
        raise ConfigError(f"{_FLAG} is for models on one device whose layers take all rows of a step at once.")


def check_weights(dtype: torch.dtype, *, native: bool, resident: bool, packed: bool) -> None:
    """Refuse weights whose products depend on the number of rows.

    Args:
        native: the model runs as a native program.
        resident: it runs on a GPU.
        packed: its weights stay quantized there.

    Raises:
        ConfigError: they do.
    """
    if native:
        return
    if not resident:
        raise ConfigError(
            f"{_FLAG}: on a CPU only Octavo's own kernels add up in one order, and they can't run this model here. "
            "Leave it out."
        )
    if packed:
        raise ConfigError(
            f"{_FLAG}: on a GPU, products with quantized weights depend on the number of rows. Serve unquantized "
            "weights, or set --dtype bfloat16, which expands those of most formats."
        )
    if dtype.itemsize != 2:
        raise ConfigError(f"{_FLAG}: on a GPU, products in {dtype} depend on the number of rows. Set --dtype bfloat16.")


def check_layers(model: Model, *, resident: bool) -> None:
    """Refuse layers that are not Octavo's own, and on a GPU those that keep a state, which depends on the chunks of a
    prompt.

    Raises:
        ConfigError: the model has some.
    """
    if not isinstance(model, CausalLM):
        raise ConfigError(f"{_FLAG}: the layers of this model are not Octavo's own. Leave it out.")
    if resident and any(isinstance(layer, StateCache) for layer in model.cached_layers):
        raise ConfigError(
            f"{_FLAG}: this model's recurrent layers compute other bits for other divisions of a prompt on a GPU. "
            "Leave it out, or serve the model on a CPU."
        )
