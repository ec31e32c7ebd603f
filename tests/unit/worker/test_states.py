"""How large blocks of hybrid models are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toy_engine import tiny_config
from toy_models import LLAMA, model_files

from octavo.build import build_core
from octavo.core.errors import ConfigError
from octavo.models.attention import widest_attention
from octavo.models.registry import spec_of
from octavo.worker.states import cells, fitting_block_size

BAMBA_9B: dict[str, Any] = {
    "architectures": ["BambaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attn_layer_indices": [9, 18, 27],
    "mamba_d_state": 128,
    "max_position_embeddings": 262144,
    "vocab_size": 128256,
}
SMALL = LLAMA | {"architectures": ["BambaForCausalLM"], "attn_layer_indices": [1]}
SMALL |= {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8}


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 1056), (torch.float8_e4m3fn, 2112)])
def test_a_block_has_room_for_a_state(dtype: torch.dtype, size: int) -> None:
    spec = spec_of(BAMBA_9B)
    assert fitting_block_size(spec, widest_attention(spec), dtype) == size
    state = max(mixer.state_bytes for mixer in spec.mixers if mixer is not None)
    assert (size - 16) * 2 * 8 * 128 * dtype.itemsize < state <= size * 2 * 8 * 128 * dtype.itemsize


def test_dense_models_keep_their_block_size() -> None:
    spec = spec_of(LLAMA)
    assert fitting_block_size(spec, widest_attention(spec), torch.float32) == 16


def test_a_block_of_states_divides_into_positions() -> None:
    assert cells(1000, 16) == 1024
    assert cells(1024, 16) == 1024


def test_the_engine_takes_the_fitting_size_and_refuses_a_smaller_one() -> None:
    loop, info = build_core(tiny_config(device="cpu", max_model_len=128), model_files(SMALL))
    loop.close()
    assert info.block_size == 32
    with pytest.raises(ConfigError, match=r"--block-size 16 .* at least 32, or leave it out"):
        build_core(tiny_config(device="cpu", max_model_len=128, block_size=16), model_files(SMALL))


def test_a_model_without_attention_has_no_longest_sequence() -> None:
    spec = spec_of({"architectures": ["Mamba2ForCausalLM"], "hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 9})
    assert spec.within(None).max_position == 32768
    assert spec.within(1 << 20).max_position == 1 << 20
