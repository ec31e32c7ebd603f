"""The flags of the engine's settings: model, KV cache, scheduling, device."""

from __future__ import annotations

from typing import get_args

from octavo.cli.flags import units
from octavo.cli.flags.flag import Flag, dtype
from octavo.core.params import LogprobsMode
from octavo.native import isa
from octavo.schedule.policy import POLICIES

MODEL = (
    Flag("model", "model.model", "same as the positional MODEL", "smollm2", metavar="MODEL"),
    Flag("tokenizer", "model.tokenizer", "take the tokenizer from this model instead", "the model's", metavar="MODEL"),
    Flag("revision", "model.revision", "branch, tag or commit of a Hugging Face id", "main"),
    Flag("tokenizer-revision", "model.tokenizer_revision", "revision of the tokenizer", "the model's"),
    Flag(
        "skip-tokenizer-init",
        "model.skip_tokenizer_init",
        "run without a tokenizer: prompts and outputs are token ids only",
        "off",
        switch=True,
        aliases=("tokens-only",),
    ),
    Flag(
        "allow-special-in-content",
        "model.allow_special_in_content",
        "parse special tokens spelled in the contents of messages, instead of treating them as text",
        "off",
        switch=True,
    ),
    Flag(
        "download-dir",
        "model.download_dir",
        "folder for downloaded models",
        "Hugging Face's cache; for the catalogue, Octavo's",
        metavar="FOLDER",
    ),
    Flag(
        "hf-overrides",
        "model.hf_overrides",
        'fields that replace those of the model\'s config, as a JSON object: {"max_position_embeddings": 65536}',
        "{}",
        units.json_object,
        metavar="JSON",
    ),
    Flag(
        "rope-scaling",
        "model.rope_scaling",
        'rotary scaling in place of the model\'s, as JSON: {"rope_type": "yarn", "factor": 4.0}',
        "{}",
        units.json_object,
        metavar="JSON",
    ),
    Flag("rope-theta", "model.rope_theta", "rotary base in place of the model's", "the model's", units.positive),
    Flag(
        "disable-sliding-window",
        "model.disable_sliding_window",
        "compute full attention in every layer, and limit requests to the model's window",
        "off",
        switch=True,
    ),
    Flag(
        "dtype",
        "model.dtype",
        "dtype that weights and activations are computed in",
        "auto",
        dtype,
        choices=("auto", "float32", "bfloat16", "float16", "float", "half"),
    ),
    Flag(
        "activation-dtype",
        "model.activation_dtype",
        "precision of activations multiplied with quantized weights on a CPU: int8 is faster on long prompts, int16 "
        "more exact; with AMX, bfloat16 is the fastest on prompts and batches, but slower for a single request",
        "int16",
        choices=("int16", "int8", "bfloat16"),
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
        "generate text, or only compute embeddings (pooling); auto depends on the checkpoint",
        "auto",
        choices=("auto", "generate", "pooling"),
    ),
    Flag(
        "convert",
        "model.convert",
        "embed turns a generative model into an embedding model, as --runner pooling does",
        "auto",
        choices=("auto", "none", "embed"),
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
        "logprobs-mode",
        "model.logprobs_mode",
        "what `logprobs` report: raw logits or those that the token is sampled from, normalized or not",
        "raw_logprobs",
        choices=get_args(LogprobsMode),
    ),
    Flag(
        "stream-interval",
        "model.stream_interval",
        "tokens per streamed chunk, except the first and the last; requests may set more",
        "1",
        units.count,
        metavar="N",
    ),
    Flag(
        "generation-config",
        "model.generation_config",
        "where sampling defaults come from: auto (the model's generation_config.json, or what the catalogue "
        "recommends), a folder with another one, or none",
        "auto",
        metavar="PLACE",
    ),
    Flag(
        "override-generation-config",
        "model.override_generation_config",
        "individual sampling defaults that override those, as a JSON object",
        "{}",
        units.json_object,
        metavar="JSON",
    ),
    Flag(
        "enable-sleep-mode",
        "model.enable_sleep_mode",
        "allow requests to release the memory of KV cache and weights for a while (/sleep)",
        "off",
        switch=True,
    ),
    Flag(
        "seed", "model.seed", "seed for random weights, and for requests without one", "0", units.natural, metavar="N"
    ),
)

CACHE = (
    Flag("block-size", "cache.block_size", "tokens in one block of the KV cache", "16", units.count, metavar="TOKENS"),
    Flag(
        "kv-cache-dtype",
        "cache.kv_cache_dtype",
        "dtype that keys and values are stored in; fp8 (fp8_e4m3) halves their memory on a GPU, int8 on a CPU",
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
        "num-gpu-blocks-override",
        "cache.num_blocks",
        "size of the KV cache in blocks, on any device",
        "what the memory holds",
        units.count,
        metavar="N",
    ),
    Flag(
        "gpu-memory-utilization",
        "cache.memory_utilization",
        "fraction of the device's memory for weights and KV cache (on a CPU, of the free memory)",
        "by the device",
        units.fraction,
        metavar="FRACTION",
        aliases=("memory-utilization",),
    ),
    Flag(
        "enable-prefix-caching",
        "cache.enable_prefix_caching",
        "share the KV cache of common prefixes between requests",
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
        "watermark",
        "scheduler.watermark",
        "fraction of the KV cache to keep free when a request starts beside others, so that fewer are preempted",
        "0",
        units.share,
        metavar="FRACTION",
    ),
    Flag(
        "scheduling-policy",
        "scheduler.policy",
        "which request goes first: the earliest, the one with the lowest `priority`, or with the largest `max_tokens`",
        "fcfs",
        choices=tuple(POLICIES),
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
        "cores that the compute threads are bound to: a list like 0-3,8, nobind, or auto (those of one NUMA node)",
        "auto",
        env="OCTAVO_CPU_OMP_THREADS_BIND",
    ),
    Flag(
        "attention-backend",
        "device.attention_backend",
        "attention kernels to use (docs/gpu.md lists the names)",
        "the fastest that fits",
    ),
    Flag("cpu-isa", "device.cpu_isa", "instruction set of the CPU kernels", "auto", choices=("auto", *isa.NAMES)),
    Flag(
        "enforce-eager",
        "device.enforce_eager",
        "launch every operation of every step instead of replaying CUDA graphs (on a GPU)",
        "off",
        switch=True,
    ),
    Flag(
        "disable-cascade-attn",
        "device.disable_cascade_attn",
        "let each decoding request read its whole context, instead of reading common prefixes of contexts once (on a "
        "GPU)",
        "off",
        switch=True,
    ),
    Flag(
        "distributed-executor-backend",
        "device.distributed_executor_backend",
        "where the model runs: uni in the engine's process, mp in a separate one",
        "uni",
        choices=("uni", "mp"),
    ),
    Flag(
        "record-steps",
        "device.record_steps",
        "write every step of the engine to FILE, with the prompts' token ids; octavo replay-steps computes them again",
        "none",
        metavar="FILE",
    ),
    Flag(
        "record-steps-limit",
        "device.record_steps_limit",
        "maximum size of that file; the engine goes on without recording",
        "1GiB",
        units.size,
        metavar="SIZE",
    ),
    Flag(
        "profiler-config",
        "device.profiler_config",
        "allow requests to make profiles of the engine (/start_profile), as JSON: "
        '{"profiler": "torch", "torch_profiler_dir": "FOLDER"}',
        "{}",
        units.json_object,
        metavar="JSON",
    ),
)
