"""How fast a workload could be at most, from what the machine reads and multiplies in a second.

The model is the usual roofline, step by step: prompts take their arithmetic; then all requests decode together, and a
step takes the longer of its arithmetic and of reading the weights and the keys and values once. Norms, rotations,
sampling and everything that is not the model are free, so no engine gets there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from workloads import Outcome, Request


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model counts.

    Attributes:
        body: parameters of all layers' matrices; `head`: those of the output layer.
        heads, kv_heads, head_size, layers: of its attention.
        vocab_size: how many tokens it knows.
    """

    body: int
    head: int
    heads: int
    kv_heads: int
    head_size: int
    layers: int
    vocab_size: int

    @property
    def kv_bytes_per_token(self) -> int:
        """With keys and values of 16 bits."""
        return 2 * 2 * self.kv_heads * self.head_size * self.layers

    @classmethod
    def of(cls, gguf: Path) -> Shape:
        from gguf import GGUFReader

        reader = GGUFReader(gguf)
        keys = {name.partition(".")[2]: field for name, field in reader.fields.items()}
        sizes = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors if len(tensor.shape) > 1}
        head = sizes.get("output.weight", sizes["token_embd.weight"])
        body = sum(size for name, size in sizes.items() if name.startswith("blk."))
        heads = int(keys["attention.head_count"].contents())
        return cls(
            body,
            head,
            heads,
            int(keys["attention.head_count_kv"].contents()),
            int(keys["embedding_length"].contents()) // heads,
            int(keys["block_count"].contents()),
            len(reader.fields["tokenizer.ggml.tokens"].data),
        )


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes read in a second; operations in a second, of matrix products and of attention's."""

    read: float
    products: float
    attention: float


def floor(requests: Sequence[Request], shape: Shape, weight_bytes: int, machine: Machine) -> Outcome:
    """The shortest times that these requests could take, a prefix that they share computed once."""
    shared = _shared_prefix(requests) if len(requests) > 1 else 0
    first = sum(_prompt_seconds(len(r.prompt) - shared, shared, shape, machine) for r in requests)
    first += _prompt_seconds(shared, 0, shape, machine)
    first += len(requests) * 2 * shape.head / machine.products
    first = max(first, weight_bytes / machine.read)
    total = first
    for step in range(1, max(r.output_tokens for r in requests)):
        contexts = [len(r.prompt) + step for r in requests if r.output_tokens > step]
        arithmetic = len(contexts) * 2 * (shape.body + shape.head) / machine.products
        arithmetic += sum(contexts) * _attention_ops(shape) / machine.attention
        reads = (weight_bytes + sum(contexts) * shape.kv_bytes_per_token) / machine.read
        total += max(arithmetic, reads)
    return Outcome(total, [r.output_tokens for r in requests], first if len(requests) == 1 else None)


def _prompt_seconds(tokens: int, before: int, shape: Shape, machine: Machine) -> float:
    """For `tokens` that follow `before` others, whose keys and values are there."""
    seen = tokens * before + tokens * (tokens + 1) / 2
    return tokens * 2 * shape.body / machine.products + seen * _attention_ops(shape) / machine.attention


def _attention_ops(shape: Shape) -> int:
    """For one query and one key and value, in all layers."""
    return 4 * shape.heads * shape.head_size * shape.layers


def _shared_prefix(requests: Sequence[Request]) -> int:
    shortest = min(len(r.prompt) for r in requests)
    for at in range(shortest):
        if len({r.prompt[at] for r in requests}) > 1:
            return at
    return shortest
