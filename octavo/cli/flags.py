"""The settings' flags: one table from which the command line, the config file, the help and the docs are made."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.cli import units
from octavo.native import isa


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting.

    Attributes:
        name: without the dashes.
        target: "section.field" of the config it sets; sections are those of `EngineConfig`, and "server".
        default: what the help shows; the value itself stands in the dataclass.
        read: text -> value.
        switch: `--name` / `--no-name`, no value.
        many: takes one or more values.
        convert: value -> the field's value, where they differ.
        env: environment variables that set it, each also read with the prefix VLLM_ in place of OCTAVO_.
    """

    name: str
    target: str
    help: str
    default: str = ""
    read: Callable[[str], Any] = str
    metavar: str | None = None
    choices: tuple[str, ...] | None = None
    aliases: tuple[str, ...] = ()
    switch: bool = False
    many: bool = False
    convert: Callable[[Any], Any] | None = None
    env: str | None = None

    def spelled(self) -> tuple[str, ...]:
        return tuple(f"--{name}" for name in (self.name, *self.aliases))


def _dtype(text: str) -> str:
    return {"float": "float32", "half": "float16"}.get(text, text)


def _item(text: str) -> list[str]:
    """One value, or a JSON list of them."""
    if not text.startswith("["):
        return [text]
    try:
        items = json.loads(text)
    except ValueError:
        items = None
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a value nor a JSON list of strings")
    return items


def _flat(items: list[list[str]]) -> tuple[str, ...]:
    return tuple(item for part in items for item in part)


MODEL = (
    Flag("model", "model.model", "the same as the positional MODEL", "smollm2", metavar="MODEL"),
    Flag("tokenizer", "model.tokenizer", "take the tokenizer from this model instead", "the model's", metavar="MODEL"),
    Flag("revision", "model.revision", "branch, tag or commit of a Hugging Face id", "main"),
    Flag(
        "dtype",
        "model.dtype",
        "the form in which weights and activations are computed",
        "auto",
        _dtype,
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
        "max-logprobs",
        "model.max_logprobs",
        "largest `logprobs` and `prompt_logprobs` of a request; -1 for no limit",
        "20",
        units.count_or_all,
        metavar="N",
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
        "what keys and values are stored in; fp8 (fp8_e4m3) halves their memory on a GPU",
        "auto",
        choices=("auto", "fp8", "fp8_e4m3", "fp8_e5m2"),
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
        "256; on a GPU 1024",
        units.count,
        metavar="N",
    ),
    Flag(
        "max-num-batched-tokens",
        "scheduler.max_num_batched_tokens",
        "tokens computed in one step; longer prompts are computed in chunks",
        "2048; on a GPU 8192",
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
    Flag("attention-backend", "device.attention_backend", "attention kernel to use", "the fastest that fits"),
    Flag("cpu-isa", "device.cpu_isa", "instruction set of the CPU kernels", "auto", choices=("auto", *isa.NAMES)),
    Flag(
        "enforce-eager",
        "device.enforce_eager",
        "launch every operation of every step instead of replaying recorded graphs (on a GPU)",
        "off",
        switch=True,
    ),
)

SERVER = (
    Flag("host", "server.host", "address to listen on; 0.0.0.0 for all", "127.0.0.1"),
    Flag("port", "server.port", "port to listen on", "8000", units.port, metavar="PORT"),
    Flag(
        "served-model-name",
        "server.served_model_name",
        "names under which clients ask for the model",
        "the model's",
        many=True,
        metavar="NAME",
    ),
    Flag(
        "api-key",
        "server.api_keys",
        "keys that clients must show one of",
        "none asked",
        many=True,
        metavar="KEY",
        env="OCTAVO_API_KEY",
    ),
    Flag("api-key-file", "server.api_key_file", "a file with more keys, one a line", "none", metavar="FILE"),
    Flag(
        "allowed-origins",
        "server.allowed_origins",
        "sites whose pages may call the server (CORS); * for all",
        "none",
        _item,
        many=True,
        metavar="ORIGIN",
        convert=_flat,
    ),
    Flag(
        "allowed-methods",
        "server.allowed_methods",
        "methods that those pages may use",
        "*",
        _item,
        many=True,
        metavar="METHOD",
        convert=_flat,
    ),
    Flag(
        "allowed-headers",
        "server.allowed_headers",
        "headers that those pages may send",
        "*",
        _item,
        many=True,
        metavar="HEADER",
        convert=_flat,
    ),
    Flag("allow-credentials", "server.allow_credentials", "let those pages send cookies", "off", switch=True),
    Flag(
        "max-num-queued-reqs",
        "server.max_num_queued_reqs",
        "sequences that may wait; further requests get a 429",
        "no limit",
        units.natural,
        metavar="N",
    ),
    Flag(
        "max-num-queued-tokens",
        "server.max_num_queued_tokens",
        "prompt tokens that may wait; further requests get a 429",
        "no limit",
        units.count,
        metavar="TOKENS",
    ),
    Flag(
        "strict-params",
        "server.strict_params",
        "refuse requests with fields that nobody knows, instead of a warning in the answer",
        "off",
        switch=True,
    ),
    Flag("chat-template", "server.chat_template", "a Jinja file, or the template itself", "the model's"),
    Flag(
        "tool-call-parser",
        "server.tool_call_parser",
        "how the model writes tool calls: auto (by its chat template), hermes, llama3_json, mistral, mistral_args, "
        "deepseek_v3, json",
        "auto",
        metavar="NAME",
    ),
    Flag(
        "reasoning-parser",
        "server.reasoning_parser",
        "how the model marks reasoning: auto (by its chat template), none, think, mistral",
        "auto",
        metavar="NAME",
    ),
    Flag("root-path", "server.root_path", "path under which a proxy publishes the server", "/", metavar="PATH"),
    Flag(
        "max-body-bytes",
        "server.max_body_bytes",
        "largest request body",
        "32MiB",
        units.size,
        metavar="BYTES",
        env="OCTAVO_HTTP_MAX_REQUEST_BODY_SIZE",
    ),
    Flag(
        "max-stop-strings",
        "server.max_stop_strings",
        "stop strings in one request",
        "4",
        units.count,
        metavar="N",
        env="OCTAVO_MAX_STOP_STRINGS",
    ),
    Flag(
        "max-n",
        "server.max_n",
        "largest `n` of a request",
        "64",
        units.count,
        metavar="N",
        env="OCTAVO_MAX_N_SEQUENCES",
    ),
    Flag("max-prompts", "server.max_prompts", "prompts in one completions request", "1024", units.count, metavar="N"),
    Flag(
        "max-schema-bytes",
        "server.max_schema_bytes",
        "largest JSON schema or grammar of a request",
        "1MiB",
        units.size,
        metavar="BYTES",
    ),
    Flag("jobs-dir", "server.jobs_dir", "folder for uploaded files and batches", "~/.local/share/octavo/jobs"),
    Flag(
        "max-file-bytes",
        "server.max_file_bytes",
        "largest file that may be uploaded",
        "200MiB",
        units.size,
        metavar="BYTES",
    ),
    Flag("max-batch-lines", "server.max_batch_lines", "requests in one batch", "50000", units.count, metavar="N"),
    Flag(
        "batch-concurrency",
        "server.batch_concurrency",
        "requests of batches that run at once, in the room that others leave",
        "the engine's sequences",
        units.count,
        metavar="N",
    ),
    Flag(
        "stall-after",
        "server.stall_after_s",
        "/health fails when work waits and no step ends for so long",
        "120",
        units.seconds,
        metavar="SECONDS",
    ),
    Flag(
        "shutdown-timeout",
        "server.shutdown_timeout_s",
        "how long running requests may go on after a stop signal",
        "30",
        units.seconds,
        metavar="SECONDS",
    ),
    Flag(
        "log-stats-interval",
        "server.log_stats_interval_s",
        "time between log lines of throughput and load; 0 for none",
        "10",
        units.seconds,
        metavar="SECONDS",
        env="OCTAVO_LOG_STATS_INTERVAL",
    ),
    Flag(
        "log-level",
        "server.log_level",
        "how much the server logs",
        "info",
        str.lower,
        choices=("debug", "info", "warning", "error", "critical"),
        aliases=("uvicorn-log-level",),
        env="OCTAVO_LOGGING_LEVEL",
    ),
    Flag(
        "enable-log-requests",
        "server.enable_log_requests",
        "log a line at the end of every request",
        "only at log level debug",
        switch=True,
    ),
    Flag(
        "trust-request-chat-template",
        "server.trust_request_chat_template",
        "let requests bring their own chat template",
        "off",
        switch=True,
    ),
    Flag(
        "disable-fastapi-docs",
        "server.enable_docs",
        "do not serve /docs and /openapi.json",
        "served",
        switch=True,
        convert=lambda off: not off,
    ),
    Flag(
        "enable-force-include-usage",
        "server.enable_force_include_usage",
        "count tokens in every stream, asked for or not",
        "off",
        switch=True,
    ),
)

ENGINE_GROUPS: Mapping[str, tuple[Flag, ...]] = {
    "model": MODEL,
    "KV cache": CACHE,
    "scheduling": SCHEDULING,
    "device": DEVICE,
}
SERVER_GROUPS: Mapping[str, tuple[Flag, ...]] = {"HTTP server": SERVER}


def flags_of(*groups: Mapping[str, tuple[Flag, ...]]) -> tuple[Flag, ...]:
    return tuple(flag for group in groups for flags in group.values() for flag in flags)
