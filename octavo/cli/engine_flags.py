"""The flags of the engine's settings: model, KV cache, scheduling, device."""

from __future__ import annotations

from octavo.cli import units
from octavo.cli.flag import Flag, dtype
from octavo.native import isa

MODEL = (
    Flag("model", "model.model", "the same as the positional MODEL", "smollm2", metavar="MODEL"),
    Flag("tokenizer", "model.tokenizer", "take the tokenizer from this model instead", "the model's", metavar="MODEL"),
    Flag("revision", "model.revision", "branch, tag or commit of a Hugging Face id", "main"),
    Flag(
        "dtype",
        "model.dtype",
        "the form in which weights and activations are computed",
        "auto",
        dtype,
        choices=("auto", "float32", "bfloat16", "float16", "float", "half"),
    ),
    Flag(
        "activation-dtype",
        "model.activation_dtype",
        "what meets weights that stay quantised on a CPU: int8 is faster on long prompts, int16 more exact",
        "int16",
        choices=("int16", "int8"),
    ),
    Flag(
        "load-format",
        "model.load_format",
        "how to read the weights; dummy fills in random ones",
        "auto",
        choices=("auto", "safetensors", "gguf", "dummy"),
    ),
    Flag(
        "max-model-len",
        "model.max_model_len",
        "prompt plus output of one request, in tokens (8k, 32K); auto fits the KV cache",
        "auto",
        units.context_length,
        metavar="TOKENS",
    ),
    Flag(
        "runner",
        "model.runner",
        "generate text, or only make vectors (pooling); auto by the checkpoint",
        "auto",
        choices=("auto", "generate", "pooling"),
    ),
    Flag(
        "convert",
        "model.convert",
        "embed makes an embedding model of one that generates, as --runner pooling does",
        "auto",
        choices=("auto", "none", "embed"),
    ),
    Flag(
        "pooler-config",
        "model.pooler_config",
        'how vectors are made, over what the model says, as JSON: {"pooling_type": "MEAN", "normalize": true}',
        "{}",
        units.json_object,
        metavar="JSON",
        aliases=("override-pooler-config",),
    ),
    Flag(
        "max-logprobs",
        "model.max_logprobs",
        "largest `logprobs` and `prompt_logprobs` of a request; -1 for no limit",
        "20",
        units.count_or_all,
        metavar="N",
    ),
    Flag(
        "stream-interval",
        "model.stream_interval",
        "tokens that are streamed together, but for the first and the last; requests may ask for more",
        "1",
        units.count,
        metavar="N",
    ),
    Flag(
        "generation-config",
        "model.generation_config",
        "where sampling defaults come from: auto (the model's generation_config.json), a folder with another, or none",
        "auto",
        metavar="PLACE",
    ),
    Flag(
        "override-generation-config",
        "model.override_generation_config",
        "single sampling defaults instead of those, as a JSON object",
        "{}",
        units.json_object,
        metavar="JSON",
    ),
    Flag(
        "logits-processors",
        "model.logits_processors",
        "code of one's own that changes logits before sampling, each as module:Class",
        "those of installed packages",
        many=True,
        metavar="MODULE:CLASS",
    ),
    Flag(
        "seed", "model.seed", "of the random weights, and of requests that bring none", "0", units.natural, metavar="N"
    ),
)

CACHE = (
    Flag("block-size", "cache.block_size", "tokens in one block of the KV cache", "16", units.count, metavar="TOKENS"),
    Flag(
        "kv-cache-dtype",
        "cache.kv_cache_dtype",
        "what keys and values are stored in; fp8 (fp8_e4m3) halves their memory on a GPU, int8 on a CPU",
        "auto",
        choices=("auto", "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "int8_per_token_head"),
    ),
    Flag(
        "kv-cache-memory-bytes",
        "cache.memory_bytes",
        "size of the KV cache (512MiB, 2G, plain bytes)",
        "what memory utilization leaves",
        units.size,
        metavar="BYTES",
    ),
    Flag(
        "gpu-memory-utilization",
        "cache.memory_utilization",
        "share of the device's memory for weights and KV cache (on a CPU, of the memory that is free)",
        "by the device",
        units.fraction,
        metavar="FRACTION",
        aliases=("memory-utilization",),
    ),
    Flag(
        "enable-prefix-caching",
        "cache.enable_prefix_caching",
        "share the KV cache of equal beginnings between requests",
        "on",
        switch=True,
    ),
)

SCHEDULING = (
    Flag(
        "max-num-seqs",
        "scheduler.max_num_seqs",
        "sequences that run at once",
        "256; on a GPU of 60 GiB 1024",
        units.count,
        metavar="N",
    ),
    Flag(
        "max-num-batched-tokens",
        "scheduler.max_num_batched_tokens",
        "tokens computed in one step; longer prompts are computed in chunks",
        "2048; on a GPU of 60 GiB 8192",
        units.count,
        metavar="TOKENS",
    ),
    Flag(
        "scheduling-policy",
        "scheduler.policy",
        "who goes first: the earliest, or the lowest `priority` of the request",
        "fcfs",
        choices=("fcfs", "priority"),
    ),
    Flag(
        "async-scheduling",
        "scheduler.depth",
        "plan the next step while the device computes this one",
        "by the device",
        switch=True,
        convert=int,
    ),
)

DEVICE = (
    Flag("device", "device.device", "where the model runs", "auto", choices=("auto", "cpu", "cuda")),
    Flag("threads", "device.threads", "compute threads on a CPU", "its cores", units.count, metavar="N"),
    Flag(
        "cpu-omp-threads-bind",
        "device.cpu_bind",
        "cores that the compute threads keep to: a list like 0-3,8, nobind, or auto for one NUMA node's",
        "auto",
        env="OCTAVO_CPU_OMP_THREADS_BIND",
    ),
    Flag(
        "attention-backend",
        "device.attention_backend",
        "attention kernel to use (docs/gpu.md has the names)",
        "the fastest that fits",
    ),
    Flag("cpu-isa", "device.cpu_isa", "instruction set of the CPU kernels", "auto", choices=("auto", *isa.NAMES)),
    Flag(
        "enforce-eager",
        "device.enforce_eager",
        "launch every operation of every step instead of replaying recorded graphs (on a GPU)",
        "off",
        switch=True,
    ),
)
