"""What an engine core says of itself once it is ready, and how it feels later on."""

from __future__ import annotations

import msgspec


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The served model and the room it has. Sizes in bytes, lengths in tokens.

    Attributes:
        name: what the user asked for.
        architecture: the checkpoint's own word, such as "LlamaForCausalLM".
        dtype: of activations.
        kv_form: what keys and values are stored in, in words.
        weights: the form in which the weights are kept, in words.
        kernels: what computes, in words.
        advice: a setting that would suit this machine, in words; mostly none.
        vocab_size: rows of the output head; token ids are below it.
        max_model_len: prompt plus output of one request.
        eos_token_ids: tokens that end a sequence unless `ignore_eos`.
        num_blocks, block_size: the KV cache's.
        kv_bytes_per_token: over all layers.
        kv_groups: block tables of a sequence; each takes a block for the same tokens.
        memory: part -> bytes, the ledger printed at start.
        phases: start-up phase -> seconds.
        step_parameters, step_weight_bytes: weights of linear layers and output head, all of which each step reads.
        accelerator: "cuda" or "cpu".
        max_logprobs: the largest `logprobs` and `prompt_logprobs` of a request; -1 for no limit.
        stream_interval: the fewest tokens of a choice that are streamed together, but for its first and its last.
        scheduling_policy: who goes first, by its name; empty where that is not known.
        tasks: what requests may ask for: "generate", "embed", "token_embed", "classify".
        pid: of the engine's process.
        profile_dir: where profiles are written; empty if none can be made.
        hidden_size: numbers in the embedding of one token.
        features: names of the optional features that are there; options of others are refused.
        feature_info: feature name -> what it tells its parts in front ends, encoded.
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

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds; more where sliding windows release blocks."""
        return self.num_blocks * self.block_size // max(self.kv_groups, 1)


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the engine makes progress. `reason` says what is wrong and since when, when `ok` is false; `final` that
    it will never be well again."""

    ok: bool
    final: bool = False
    reason: str = ""


class Received(msgspec.Struct, frozen=True):
    """What has come from the engine for a request so far: tokens of all choices, and when the last ones came, by
    `time.monotonic`."""

    tokens: int = 0
    at: float | None = None
