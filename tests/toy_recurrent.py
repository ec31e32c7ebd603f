"""A tiny decoder with recurrent layers between those of attention, and its tokens computed in the plainest way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from toy_engine import strict, tiny_config
from toy_models import LLAMA, VOCAB, model_files

from octavo.build import build_core
from octavo.engine.loop import EngineLoop
from octavo.models.decoder import CausalLM
from octavo.models.mixers.attention import Attention
from octavo.models.spec import DecoderSpec
from octavo.nn.attention.layer import PagedAttention
from octavo.nn.attention.reference import ReferenceAttention
from octavo.nn.build import Build
from octavo.nn.norm import RMSNorm
from octavo.nn.rope import Rope
from octavo.nn.state import StateCache
from octavo.nn.step import StepInput
from octavo.nn.stream import Stream

_SSM = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2}
_NO_ATTENTION = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "eos_token_id": 3}
FAMILIES: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": LLAMA | _SSM | {"attn_layer_indices": [1]},
    "JambaForCausalLM": LLAMA | {"num_experts": 1, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4},
    "Lfm2ForCausalLM": LLAMA | {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16},
    "Mamba2ForCausalLM": _NO_ATTENTION | {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 2},
    "Qwen3NextForCausalLM": LLAMA
    | {"layer_types": ["linear_attention", "full_attention"], "num_experts": 0, "head_dim": 16}
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
"""A small configuration of each kind of recurrent mixer, of two layers."""


def engine(config: dict[str, Any], **settings: Any) -> EngineLoop:
    """An engine on a CPU, which raises what fails in a step."""
    loop = build_core(tiny_config(**{"max_model_len": 128, "device": "cpu"} | settings), model_files(config))[0]
    return strict(loop)


DECAY = 0.9
SNAPSHOT = 16


class Decayed(Attention):
    """Linear attention: out_t = q_t S_t, with S_t = DECAY S_(t-1) + k_t v_t^T for each key-value head."""

    def __init__(self, b: Build, spec: DecoderSpec, layer: int, rope: Rope) -> None:
        super().__init__(b, spec, layer, rope)
        del self.attn
        shape = (spec.num_kv_heads, spec.head_dim, spec.head_dim)
        self.states = StateCache([shape], b.path, snapshot_tokens=SNAPSHOT)

    def forward(self, stream: Stream, norm: RMSNorm, step: StepInput) -> Tensor:
        q, k, v = self.heads(stream, norm)
        (states,) = self.states.load(step)
        out = torch.empty_like(q)
        for row, state in enumerate(states):
            for t in range(int(step.query_start[row]), int(step.query_start[row + 1])):
                state.mul_(DECAY).add_(k[t, :, :, None] * v[t, :, None, :])
                out[t] = (q[t].unflatten(0, (len(state), -1)) @ state).flatten(0, 1)
        self.states.store(step, [states])
        return out.flatten(1)

    def heads(self, stream: Stream, norm: RMSNorm) -> list[Tensor]:
        """Queries, keys and values [T, heads, head_dim]; queries and keys have length 1."""
        heads = self.qkv.after_norm(stream, norm).unflatten(-1, (-1, self.head_dim)).float()
        q, k, v = heads.split(self.head_counts, dim=1)
        return [torch.nn.functional.normalize(q, dim=-1), torch.nn.functional.normalize(k, dim=-1), v]


class Summed(Decayed):
    """The same as a sum over all earlier tokens, in float64: out_t = sum over s <= t of DECAY^(t-s) (q_t k_s) v_s.

    For steps of one whole sequence.
    """

    def forward(self, stream: Stream, norm: RMSNorm, step: StepInput) -> Tensor:
        q, k, v = (x.double() for x in self.heads(stream, norm))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
        weights = torch.where(distance >= 0, DECAY ** distance.clamp(min=0).double(), 0.0)
        return torch.einsum("thd,shd,ts,shc->thc", q, k, weights, v).float().flatten(1)


class Hybrid(CausalLM):
    """Every second layer is recurrent."""

    mixer: type[Decayed] = Decayed

    def __init__(self, b: Build, spec: DecoderSpec) -> None:
        super().__init__(b, spec)
        for i in range(0, spec.num_layers, 2):
            self.layers[i].mixer = self.mixer(b.at("model", "layers", i, "self_attn"), spec, i, self.rope_of(i))
        self.attention_layers = [m for m in self.modules() if isinstance(m, PagedAttention)]
        self.cached_layers = [m for m in self.modules() if isinstance(m, PagedAttention | StateCache)]


class Plain(Hybrid):
    """Computes whole sequences, without a state."""

    mixer = Summed


@torch.inference_mode()
def plain_greedy(model: Plain, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens, each computed from the whole sequence."""
    tokens = list(prompt)
    for layer in model.attention_layers:
        assert isinstance(layer.backend, ReferenceAttention)
        layer.cache = torch.zeros(layer.backend.cache_shape(layer.spec, 1, len(prompt) + count))
    for _ in range(count):
        length = len(tokens)
        order = torch.arange(length)
        step = StepInput(
            input_ids=torch.tensor(tokens),
            positions=order,
            query_start=torch.tensor([0, length], dtype=torch.int32),
            seq_lens=torch.tensor([length], dtype=torch.int32),
            block_tables=torch.zeros(1, 1, dtype=torch.int32),
            slot_mapping=order,
            logit_rows=order[-1:],
            max_query_len=length,
            max_seq_len=length,
        )
        hidden = model.forward(model.embed(step), step)
        tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]
