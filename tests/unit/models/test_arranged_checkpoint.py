"""Checkpoints under other names, with fused, transposed and reordered tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from octavo.models.load.arranged import arranged
from octavo.models.load.checkpoint import Checkpoint
from octavo.models.load.tensors import TensorCheckpoint
from octavo.models.registry import spec_of
from octavo.models.spec import DecoderSpec, StoredModule, StoredNames, StoredStack
from octavo.nn.rope_spec import RopeSpec
from octavo.nn.weights import Index, QuantizedBlocks, TensorSpec

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 8,
    "max_position_embeddings": 16,
}


def spec(**changes: Any) -> DecoderSpec:
    return replace(spec_of(CONFIG), **changes)


def values(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    return checkpoint.tensor(name, TensorSpec((), torch.float32))


def test_a_checkpoint_in_llamas_form_is_itself() -> None:
    source = TensorCheckpoint({"model.norm.weight": torch.ones(32)})
    assert arranged(source, spec()) is source


def test_fused_rows_are_divided_run_by_run() -> None:
    names = ("layers.{}.a", "layers.{}.b")
    stored = StoredNames("base", (StoredModule("blocks.{}.both", names, (2, 1)),), ignored=(".buffer",))
    source = TensorCheckpoint({
        "base.blocks.4.both.weight": torch.arange(12.0).view(6, 2),
        "base.blocks.4.both.bias": torch.arange(6.0),
        "base.blocks.4.buffer": torch.ones(1),
        "lm_head.weight": torch.ones(8, 32),
    })  # fmt: skip
    checkpoint = arranged(source, spec(stored=stored))
    assert set(checkpoint.names()) == {
        "model.layers.4.a.weight",
        "model.layers.4.b.weight",
        "model.layers.4.a.bias",
        "model.layers.4.b.bias",
        "lm_head.weight",
    }
    assert values(checkpoint, "model.layers.4.a.weight")[:, 0].tolist() == [0, 2, 6, 8]
    assert values(checkpoint, "model.layers.4.b.bias").tolist() == [2, 5]
    assert checkpoint.shape("model.layers.4.b.weight") == (2, 2)
    part = checkpoint.tensor("model.layers.4.a.weight", TensorSpec((4, 2), torch.float32), (slice(1, 3), slice(None)))
    assert part[:, 0].tolist() == [2, 6]


def test_transposed_matrices_are_turned_and_biases_are_not() -> None:
    fused = StoredModule("layers.{}.c", ("layers.{}.a", "layers.{}.b"), (1, 2), transposed=True)
    weight, bias = torch.arange(6.0).view(2, 3), torch.arange(3.0)
    source = TensorCheckpoint({"model.layers.0.c.weight": weight, "model.layers.0.c.bias": bias})
    checkpoint = arranged(source, spec(stored=StoredNames(modules=(fused,))))
    assert values(checkpoint, "model.layers.0.b.weight").tolist() == [[1, 4], [2, 5]]
    assert values(checkpoint, "model.layers.0.a.bias").tolist() == [0]


def test_a_bare_model_lacks_the_root_or_its_first_part() -> None:
    stored = StoredNames("model.decoder", (StoredModule("final", ("norm",)),))
    for prefix in ("model.decoder.", "decoder.", ""):
        checkpoint = arranged(TensorCheckpoint({f"{prefix}final.weight": torch.ones(32)}), spec(stored=stored))
        assert set(checkpoint.names()) == {"model.norm.weight"}


def test_channels_are_brought_into_halves() -> None:
    """Channels 2 i and 2 i + 1 of a head of 16 become i and 8 + i; with 4 rotated ones, the rest fills the halves."""
    rows = torch.arange(32.0)[:, None].expand(32, 32)
    source = TensorCheckpoint({
        "model.layers.0.self_attn.q_proj.weight": rows,
        "model.layers.0.self_attn.v_proj.weight": rows,
        "model.layers.0.self_attn.k_norm.weight": torch.arange(16.0),
    })  # fmt: skip
    checkpoint = arranged(source, spec(rope=RopeSpec(16, 16, interleaved=True)))
    q = values(checkpoint, "model.layers.0.self_attn.q_proj.weight")[:, 0].tolist()
    assert q[:16] == [*range(0, 16, 2), *range(1, 16, 2)]
    assert q[16:24] == list(range(16, 32, 2))
    assert values(checkpoint, "model.layers.0.self_attn.v_proj.weight")[:, 0].tolist() == list(range(32))
    checkpoint = arranged(source, spec(rope=RopeSpec(4, 16, head_dim=16)))
    k = values(checkpoint, "model.layers.0.self_attn.k_norm.weight").tolist()
    assert k == [0, 1, *range(4, 10), 2, 3, *range(10, 16)]


class Blocks(TensorCheckpoint):
    def blocks(
        self, name: str, entry: int | None = None, *, codes: bool = False, index: Index | None = None
    ) -> QuantizedBlocks | None:
        rows = torch.arange(32)[:, None]
        return QuantizedBlocks(rows.expand(32, 32).to(torch.uint8), rows.half(), None, 8, 4)


def test_quantized_rows_are_reordered_with_their_scales() -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    source = Blocks({name: torch.zeros(32, 32)})
    blocks = arranged(source, spec(rope=RopeSpec(16, 16, interleaved=True))).blocks(name)
    assert blocks is not None
    assert blocks.values[:3, 0].tolist() == blocks.scales[:3, 0].tolist() == [0, 2, 4]


def test_tensors_of_all_experts_are_read_one_expert_at_a_time() -> None:
    reads: list[object] = []

    class Watched(TensorCheckpoint):
        def tensor(self, name: str, spec: TensorSpec, index: Index | None = None) -> torch.Tensor:
            reads.append(index)
            return super().tensor(name, spec, index)

    each = "layers.{}.mlp.experts.{}."
    stacks = (
        StoredStack("layers.{}.moe.in", (f"{each}gate.weight", f"{each}up.weight")),
        StoredStack("layers.{}.moe.both", (f"{each}a.weight", f"{each}b.weight"), transposed=True, alternating=True),
        StoredStack("layers.{}.moe.bias", (f"{each}a.bias", f"{each}b.bias"), alternating=True),
    )
    source = Watched({
        "model.layers.1.moe.in": torch.arange(24.0).view(2, 4, 3),
        "model.layers.1.moe.both": torch.arange(16.0).view(2, 2, 4),
        "model.layers.1.moe.bias": torch.arange(8.0).view(2, 4),
    })  # fmt: skip
    checkpoint = arranged(source, spec(stored=StoredNames(stacks=stacks)))
    assert len(checkpoint.names()) == 12
    assert values(checkpoint, "model.layers.1.mlp.experts.1.up.weight").tolist() == [[18, 19, 20], [21, 22, 23]]
    assert reads == [(slice(1, 2), slice(0, 4), slice(0, 3))]
    assert values(checkpoint, "model.layers.1.mlp.experts.0.b.weight").tolist() == [[1, 5], [3, 7]]
    assert values(checkpoint, "model.layers.1.mlp.experts.1.a.bias").tolist() == [4, 6]
    assert checkpoint.shape("model.layers.1.mlp.experts.0.b.weight") == (2, 2)


def test_a_name_may_have_the_numbers_of_layer_and_expert() -> None:
    module = StoredModule("layers.{}.moe.experts.{}.w1", ("layers.{}.mlp.experts.{}.gate_proj",))
    source = TensorCheckpoint({"model.layers.3.moe.experts.12.w1.weight": torch.ones(2)})
    names = arranged(source, spec(stored=StoredNames(modules=(module,)))).names()
    assert names == {"model.layers.3.mlp.experts.12.gate_proj.weight"}
