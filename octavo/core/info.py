"""Facts that an engine core reports when it is ready, and its health."""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The served model and its capacity. Sizes in bytes, lengths in tokens.

    Attributes:
        name: the model's name, as the user gave it.
        architecture: the checkpoint's architecture, such as "LlamaForCausalLM".
        device: the device's name.
        dtype: of activations.
        kv_form: storage format of keys and values, for display.
        weights: storage format of the weights, for display.
        kernels: names of the kernels, for display.
        advice: a setting that would suit this machine, for display; usually empty.
        vocab_size: rows of the output head; token ids are below it.
        max_model_len: prompt plus output of one request.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: tokens of a step, of all ranks together.
        eos_token_ids: tokens that end a sequence unless `ignore_eos`.
        num_blocks, block_size: blocks of the KV cache, and tokens per block.
        kv_bytes_per_token: over all layers whose memory grows with a sequence.
        kv_groups: block tables per sequence; each takes a block for the same tokens.
        kv_longest: most blocks held by a sequence of `max_model_len`; 0 if all layers have full attention.
        kv_reads: (window, bytes per token) for each window among the layers, 0 for full attention: what a decoding step
            reads. Empty if all layers have full attention.
        memory: part -> bytes, as printed at start.
        phases: phase of the start -> seconds.
        step_parameters, step_weight_bytes: weights of linear layers and output head, which each step reads completely.
        accelerator: "cuda" or "cpu".
        max_logprobs: the largest `logprobs` and `prompt_logprobs` of a request; -1 for no limit.
        stream_interval: least tokens of a choice in a streamed item, except the first and the last.
        scheduling_policy: the policy's name; empty if unknown.
        tasks: supported tasks: "generate", "embed", "token_embed", "classify".
        pid: of the engine's process.
        profile_dir: folder of profiles; empty if profiling is off.
        hidden_size: elements of the embedding of one token.
        features: names of the available optional features; options of others are refused.
        feature_info: feature name -> encoded facts for the feature's front-end parts.
    """

    name: str
    architecture: str
    device: str
    dtype: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: list[int]
    num_blocks: int
    block_size: int
    kv_bytes_per_token: int
    max_num_seqs: int
    max_num_batched_tokens: int
    memory: dict[str, int]
    phases: dict[str, float]
    weights: str = ""
    kernels: str = ""
    advice: str = ""
    step_parameters: int = 0
    step_weight_bytes: int = 0
    accelerator: str = "cpu"
    kv_form: str = ""
    max_logprobs: int = 20
    stream_interval: int = 1
    scheduling_policy: str = ""
    hidden_size: int = 0
    features: list[str] = msgspec.field(default_factory=list)
    tasks: list[str] = msgspec.field(default_factory=lambda: ["generate"])
    feature_info: dict[str, msgspec.Raw] = msgspec.field(default_factory=dict)
    pid: int = 0
    profile_dir: str = ""
    kv_groups: int = 1
    kv_longest: int = 0
    kv_reads: list[tuple[int, int]] = msgspec.field(default_factory=list)

    @property
    def kv_tokens(self) -> int:
        """Tokens that fit into the KV cache; if some layers don't keep all, those of sequences of `max_model_len`."""
        if self.kv_longest:
            return self.num_blocks * self.max_model_len // self.kv_longest
        return self.num_blocks * self.block_size // max(self.kv_groups, 1)

    def facts(self, feature: str, kind: type[T]) -> T | None:
        """Return a feature's entry in `feature_info`, decoded as this type; None if there is none."""
        found = self.feature_info.get(feature)
        return None if found is None else msgspec.msgpack.decode(found, type=kind)


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Health of the engine.

    Attributes:
        ok: whether it makes progress.
        final: whether it can't recover.
        reason: if not `ok`: the problem, and for how long it has lasted.
    """

    ok: bool
    final: bool = False
    reason: str = ""


class Received(msgspec.Struct, frozen=True):
    """Output received for a request so far.

    Attributes:
        tokens: of all choices.
        at: `time.monotonic()` of the last ones; None before the first.
    """

    tokens: int = 0
    at: float | None = None
