"""Settings: one frozen dataclass for each floor. Nothing below `build.py` ever sees more than its own."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from octavo.core import quantities
from octavo.core.errors import ConfigError
from octavo.core.keywords import near
from octavo.core.params import LogprobsMode, SamplingParams
from octavo.features import FeatureSettings, settings_types
from octavo.foreign import check_keyword

DEFAULT_MODEL = "smollm2"

# Settings whose flag (and vLLM's keyword) is not the field's name.
_FLAG_NAMES = {
    "kv_cache_memory_bytes": "memory_bytes",
    "num_gpu_blocks_override": "num_blocks",
    "gpu_memory_utilization": "memory_utilization",
    "scheduling_policy": "policy",
    "async_scheduling": "depth",
    "cpu_omp_threads_bind": "cpu_bind",
}
_FROM_ZERO = {"seed", "depth", "watermark"}
_NO_FRACTIONS = {"rope_theta"}
_ALL = {"max_logprobs"}
"""Counts that may be -1, for no limit."""
_READ: dict[str, Callable[[str], int | float | None]] = {
    "max_model_len": quantities.context_length,
    "rope_theta": quantities.positive,
    "max_logprobs": quantities.count_or_all,
    "stream_interval": quantities.count,
    "seed": quantities.natural,
    "block_size": quantities.count,
    "memory_bytes": quantities.size,
    "num_blocks": quantities.count,
    "record_steps_limit": quantities.size,
    "memory_utilization": quantities.fraction,
    "max_num_seqs": quantities.count,
    "max_num_batched_tokens": quantities.count,
    "watermark": quantities.share,
    "threads": quantities.count,
}
"""How a number is read that is given as text, such as "8k" or "2GiB"; the command line reads it the same way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model to run, and how.

    Attributes:
        model: a catalogue name, a folder, a .gguf file or a Hugging Face id.
        tokenizer: where to take the tokenizer from, if not from the model.
        tokenizer_revision: of it; None takes the model's, or the newest of another repository.
        allow_special_in_content: special tokens that are spelled in the contents of messages are read as such.
        skip_tokenizer_init: take and give token ids alone, without a tokenizer.
        download_dir: where downloaded models are kept; None takes the cache folders of `hub/cache.py` and Hugging Face.
        hf_overrides: fields of the model's config that replace its own, before anything reads it.
        rope_scaling, rope_theta: older names of two of them.
        disable_sliding_window: full attention in all layers, of requests that are no longer than the model's window.
        dtype: "auto" takes the checkpoint's, or float32 on machines without fast bfloat16; quantized weights stay
            integers if the machine has kernels for them. All weights are converted to any other dtype.
        activation_dtype: what activations are rounded to when they are multiplied with integer weights (on a CPU, if no
            dtype is set): "int16" is as exact as bfloat16, "int8" computes prompts up to twice as fast. "bfloat16"
            rounds the weights to bfloat16 too, whenever they are multiplied: with AMX the fastest for prompts and
            batches, though not for a single request.
        load_format: "auto" goes by the files found; "dummy" makes random weights.
        max_model_len: None takes the model's, reduced to what the KV cache holds.
        runner: "generate" text, or only compute embeddings ("pooling"); "auto" goes by the checkpoint.
        convert: what a pooling runner makes of the model: "embed" for embeddings; "auto" goes by the checkpoint.
        max_logprobs: the largest `logprobs` that a request may ask for; -1 for no limit.
        logprobs_mode: what `logprobs` tell: of the model's own logits ("raw") or of those that a token is drawn from
            ("processed": after penalties, bans, temperature and filters); log-probabilities or the logits themselves.
        stream_interval: tokens of a choice in each streamed chunk; requests may ask for more.
        generation_config: where sampling defaults come from: "auto" for the model's generation_config.json, a folder
            with another one, or "none" (also "vllm") for the defaults of `SamplingParams`.
        override_generation_config: individual defaults that replace those, such as {"temperature": 0.5}.
        enable_sleep_mode: requests may make the engine release the memory of KV cache and weights for a while.
    """

    model: str = DEFAULT_MODEL
    tokenizer: str | None = None
    revision: str | None = None
    tokenizer_revision: str | None = None
    skip_tokenizer_init: bool = False
    allow_special_in_content: bool = False
    download_dir: str | None = None
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    rope_scaling: dict[str, Any] = field(default_factory=dict)
    rope_theta: float | None = None
    disable_sliding_window: bool = False
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    activation_dtype: Literal["int16", "int8", "bfloat16"] = "int16"
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"
    max_model_len: int | None = None
    runner: Literal["auto", "generate", "pooling"] = "auto"
    convert: Literal["auto", "none", "embed"] = "auto"
    max_logprobs: int = 20
    logprobs_mode: LogprobsMode = "raw_logprobs"
    stream_interval: int = 1
    seed: int = 0
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] = field(default_factory=dict)
    enable_sleep_mode: bool = False

    @property
    def config_overrides(self) -> dict[str, Any]:
        """Field of the model's config -> its value, by whichever setting it was given.

        Raises:
            ConfigError: a field is given by two settings.
        """
        older = {name: value for name in ("rope_scaling", "rope_theta") if (value := getattr(self, name))}
        twice = next((name for name in older if name in self.hf_overrides), None)
        if twice is not None:
            raise ConfigError(f"--hf-overrides {twice} and --{twice.replace('_', '-')} are both given; leave one out.")
        return self.hf_overrides | older


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The KV cache.

    Attributes:
        kv_cache_dtype: what keys and values are stored as: "auto" is the model's dtype; "fp8" is "fp8_e4m3";
            "int8_per_token_head" is "int8".
        memory_bytes: its size; None takes what `memory_utilization` leaves after the weights.
        num_blocks: its size in blocks, whatever memory they take, but no more than `memory_bytes` if that is set.
        memory_utilization: fraction of the device's memory (on a CPU, of the available memory) for weights and cache.
    """

    block_size: int = 16
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "int8_per_token_head"] = "auto"
    memory_bytes: int | None = None
    num_blocks: int | None = None
    memory_utilization: float | None = None
    enable_prefix_caching: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How steps are filled.

    Attributes:
        max_num_seqs: sequences that run at once; None takes 256, and 1,024 on a GPU of 60 GiB or more.
        max_num_batched_tokens: tokens computed in one step; None takes 2,048, and 8,192 on a GPU of 60 GiB or more.
        watermark: part of the KV cache that is kept free when a request is admitted while others run.
        policy: a name in `schedule/policy.py`.
        depth: steps launched ahead of the oldest unread one: 0 is synchronous, 1 overlaps; None lets the device choose.
    """

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    watermark: float = 0.0
    policy: str = "fcfs"
    depth: int | None = None

    def limits(self, default_seqs: int, default_tokens: int) -> tuple[int, int]:
        """Sequences and tokens of a step; if only one of them is set, the other's default is adjusted to fit."""
        tokens = self.max_num_batched_tokens or max(default_tokens, self.max_num_seqs or 0)
        return self.max_num_seqs or min(default_seqs, tokens), tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """Where the model runs.

    Attributes:
        threads: compute threads on a CPU; None takes the physical cores given to this process.
        cpu_bind: the cores that it is bound to on a CPU: "auto", "nobind" or a list (0-3,8); see `device/binding.py`.
        cpu_isa: the instruction set of the CPU kernels: "auto" or a name in `native/isa.py`.
        enforce_eager: launch every operation of every step; otherwise, decoding on a GPU is recorded once and replayed.
        disable_cascade_attn: requests that decode on a GPU read their whole contexts, each its own; otherwise what
            contexts have in common is read once.
        distributed_executor_backend: "uni" has the model in the engine's process, "mp" in one of its own.
        record_steps: a file that gets every plan, payload and output, to be computed again; see `engine/record.py`.
        record_steps_limit: bytes of that file.
        profiler_config: where profiles are written and what is in them; see `core/profiling.py`. Without it the
            environment variable for the folder counts.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = None
    attention_backend: str | None = None
    cpu_bind: str = "auto"
    cpu_isa: str = "auto"
    enforce_eager: bool = False
    disable_cascade_attn: bool = False
    distributed_executor_backend: Literal["uni", "mp"] = "uni"
    record_steps: str | None = None
    record_steps_limit: int = 1 << 30
    profiler_config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All that `build.py` needs to make an engine core.

    Attributes:
        features: feature name -> its own settings, for the features that have some.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    features: dict[str, FeatureSettings] = field(
        default_factory=lambda: {name: kind() for name, kind in settings_types().items()}
    )

    @classmethod
    def of(cls, **settings: Any) -> EngineConfig:
        """From settings named like their fields, or like their command-line flags where these differ.

        None takes the default. Settings of other engines are refused, or ignored with a warning: see `foreign`.

        Raises:
            TypeError: there is no such setting; the text suggests similar names.
            ConfigError: a value that the setting can't have.
        """
        floors = {section.name: section.default_factory for section in fields(cls) if section.name != "features"}
        sections: dict[str, Any] = floors | settings_types()
        home = {f.name: name for name, made in sections.items() for f in fields(made)}
        chosen: dict[str, dict[str, Any]] = {name: {} for name in sections}
        for given, value in settings.items():
            name = _FLAG_NAMES.get(given, given)
            if name not in home and check_keyword(given, value):
                continue
            if name not in home:
                raise _unknown(given, [*home, *_FLAG_NAMES])
            value = _by_other_words(name, given, value)
            kind = get_type_hints(sections[home[name]])[name]
            if value is None and type(None) not in get_args(kind):
                continue  # the default
            _check(kind, name, given, value)
            chosen[home[name]][name] = tuple(value) if isinstance(value, list) else value
        made = {name: section(**chosen[name]) for name, section in sections.items()}
        return cls(**{name: made.pop(name) for name in floors}, features=made)

    @classmethod
    def restored(cls, plain: Mapping[str, Any]) -> EngineConfig:
        """The settings that `msgspec.to_builtins` made plain.

        Raises:
            msgspec.ValidationError: they are not of this version.
        """
        own = plain.get("features", {})
        features = {name: msgspec.convert(own.get(name, {}), kind) for name, kind in settings_types().items()}
        kinds = get_type_hints(cls)
        floors = {name: msgspec.convert(plain[name], kinds[name]) for name in plain if name != "features"}
        return cls(**floors, features=features)

    @property
    def needs_weights(self) -> bool:
        """Whether weight files are read at all."""
        return self.model.load_format != "dummy"


def _unknown(given: str, known: list[str]) -> TypeError:
    """The error about a setting that there is not; parameters of requests are often given in its place."""
    if given in SamplingParams.__struct_fields__:
        return TypeError(f"there is no setting {given!r}; it belongs to a request: SamplingParams({given}=...)")
    hint = near(given, known, most=3) or near(given, SamplingParams.__struct_fields__, cutoff=0.8)
    return TypeError(f"there is no setting {given!r}{hint}")


def _by_other_words(name: str, given: str, value: Any) -> Any:
    """A value as the field has it, from words that scripts and other engines use for it."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if name == "dtype" and value is not None:
        text = str(value).removeprefix("torch.")
        return {"half": "float16", "float": "float32"}.get(text, text)
    if name == "max_model_len" and value == -1:
        return None
    if isinstance(value, str) and name in _READ:
        try:
            return _READ[name](value)
        except ValueError as error:
            raise ConfigError(f"{given}: {error}.") from None
    return int(value) if given == "async_scheduling" and value is not None else value


def _check(kind: Any, name: str, given: str, value: Any) -> None:
    """Whether a value is of the field's type and range; the command line has its own checks, nearer to its words."""
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ConfigError(f"{given}={value!r} is not known; choose one of: {', '.join(get_args(kind))}.")
        return
    kinds = get_args(kind) or (kind,)
    if value is None and type(None) in kinds:
        return
    if kind in (str, str | None) and not isinstance(value, str):
        raise ConfigError(f"{given}={value!r} must be a text.")
    smallest = 0 if name in _FROM_ZERO else 1
    if int in kinds and (type(value) is not int or value < smallest) and not (name in _ALL and value == -1):
        words = ", or -1 for all" if name in _ALL else ""
        raise ConfigError(f"{given}={value!r} must be a whole number of at least {smallest}{words}.")
    if float in kinds:
        least = "at least 0" if name in _FROM_ZERO else "over 0"
        most, words = (math.inf, "") if name in _NO_FRACTIONS else (1, " and up to 1")
        if type(value) not in (int, float) or not (0 < value <= most or (value == 0 and name in _FROM_ZERO)):
            raise ConfigError(f"{given}={value!r} must be a number {least}{words}.")
    if get_origin(kind) is tuple and not isinstance(value, list | tuple):
        raise ConfigError(f"{given}={value!r} must be a list.")
    if get_origin(kind) is dict and not isinstance(value, dict):
        raise ConfigError(f"{given}={value!r} must be a dict.")
    if bool in kinds and type(value) is not bool:
        raise ConfigError(f"{given}={value!r} must be True or False.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP front door. Sizes in bytes, times in seconds.

    Attributes:
        api_server_count: processes that answer HTTP, all on the same address and before the same engine.
        tool_call_parser, reasoning_parser: how the model writes calls and reasoning; "auto" by its chat template.
        tool_parser_plugin: a Python file that declares more formats of tool calls.
        reasoning_config: other marks of reasoning: `reasoning_start_str` and `reasoning_end_str`.
        api_key_file: more keys, one a line.
        allowed_origins, allowed_methods, allowed_headers, allow_credentials: what other sites' pages may do (CORS);
            nothing without an origin.
        middleware: code of the user's own around the application, as "package.module.name"; the last is outermost.
        max_num_queued_reqs, max_num_queued_tokens: what may wait for the engine before requests are refused.
        response_role: of the messages in answers to chats, unless they continue a message.
        chat_template_content_format: how the template gets a message's content: as a string, or as a list of parts
            ("openai"); "auto" goes by the template's code.
        default_chat_template_kwargs: variables for the chat template, where a request does not set them.
        return_tokens_as_token_ids: write tokens in logprobs as `token_id:7`, as requests may ask for themselves.
        disable_log_stats: no lines of throughput and load.
        strict_params: refuse fields that nobody knows, instead of naming them in `warnings`.
        max_prompts: prompts in one request to /v1/completions.
        max_inputs: inputs in one request for embeddings, documents in one rerank.
        max_schema_bytes: a schema or grammar of one request.
        enable_per_request_metrics: tell in the answer where its time went.
        otlp_traces_endpoint: the collector that traces are sent to; None for no traces.
        fingerprint_mode, fingerprint_value: the `system_fingerprint` of answers: made of version, model and device
            ("full" and "hash"), the value ("custom"), or none.
        enable_log_requests: log a line at the end of every request (otherwise only at the level debug), and at that
            level its prompt.
        enable_log_outputs: with that, log what was generated; with `enable_log_deltas` also each piece as it comes.
        max_log_len: characters or token ids of each that are logged; None for all.
        log_config_file: JSON for `logging.config.dictConfig`, in place of `log_level`.
        configure_logging: set up logging at all.
        disable_uvicorn_access_log, disable_access_log_for_endpoints: no line for each HTTP request at the level debug,
            or none for those to some paths.
        trust_request_chat_template: let requests bring their own chat template.
        enable_tokenizer_info_endpoint: serve /tokenizer_info, chat template and all.
        skip_model_name_validation: answer requests for models of any name.
        server_dev_mode: serve the routes for development: /reset_prefix_cache, /server_info and the like.
        max_unread_tokens: of one request, that wait for a client that reads slowly before the request is ended.
        unread_timeout_s: how long a client may leave what was sent to it unread before its connection is closed.
        sse_keep_alive_s: a stream that has been silent for so long sends a comment, so that no proxy cuts it; 0 for
            never.
        jobs_dir: where uploaded files and batches are kept; None takes jobs/ in the user's folder for Octavo's data.
        max_file_bytes: the largest upload.
        max_batch_lines: requests in one batch.
        batch_concurrency: requests of batches that run at once; None takes as many as the engine's sequences.
        uds: a socket file to listen on instead of host and port.
        ssl_certfile, ssl_keyfile, ssl_keyfile_password: PEM files of the server's certificate and key; TLS is served
            where there is a certificate. The key may be in the certificate's file.
        ssl_ca_certs, ssl_cert_reqs: the authorities of clients' certificates, and whether one is asked for: 0 no,
            1 optional, 2 required.
        enable_ssl_refresh: read certificate and key again when their files change.
        max_concurrent_requests: requests answered at once before others get a 503; None for no limit.
        keep_alive_s: an idle connection is closed after so long. By default longer than clients keep theirs, so that
            it is they who close them.
        body_timeout_s: a request's headers must have come by then, and after as much again its body; each 16 KiB of
            that which are there add a second.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    api_server_count: int = 1
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_keyfile_password: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0
    ssl_ciphers: str | None = None
    enable_ssl_refresh: bool = False
    max_concurrent_requests: int | None = None
    keep_alive_s: int = 65
    body_timeout_s: float = 60.0
    served_model_name: tuple[str, ...] = ()
    chat_template: str | None = None
    response_role: str = "assistant"
    chat_template_content_format: Literal["auto", "string", "openai"] = "auto"
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    return_tokens_as_token_ids: bool = False
    disable_log_stats: bool = False
    tool_call_parser: str = "auto"
    tool_parser_plugin: str | None = None
    reasoning_parser: str = "auto"
    reasoning_config: dict[str, Any] = field(default_factory=dict)
    api_keys: tuple[str, ...] = ()
    api_key_file: str | None = None
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    middleware: tuple[str, ...] = ()
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    strict_params: bool = False
    max_body_bytes: int = 32 * 1024 * 1024
    max_stop_strings: int = 4
    max_n: int = 64
    max_prompts: int = 1024
    max_inputs: int = 2048
    max_schema_bytes: int = 1024 * 1024
    stall_after_s: float = 120.0
    shutdown_timeout_s: float = 30.0
    log_stats_interval_s: float = 10.0
    enable_docs: bool = True
    enable_force_include_usage: bool = False
    enable_prompt_tokens_details: bool = False
    enable_per_request_metrics: bool = False
    otlp_traces_endpoint: str | None = None
    fingerprint_mode: Literal["full", "hash", "custom", "none"] = "full"
    fingerprint_value: str | None = None
    enable_log_requests: bool = False
    enable_log_outputs: bool = False
    enable_log_deltas: bool = True
    max_log_len: int | None = None
    log_config_file: str | None = None
    configure_logging: bool = True
    disable_uvicorn_access_log: bool = False
    disable_access_log_for_endpoints: tuple[str, ...] = ()
    trust_request_chat_template: bool = False
    enable_tokenizer_info_endpoint: bool = False
    skip_model_name_validation: bool = False
    server_dev_mode: bool = False
    max_unread_tokens: int = 4096
    unread_timeout_s: float = 60.0
    sse_keep_alive_s: float = 0.0
    jobs_dir: str | None = None
    max_file_bytes: int = 200 * 1024 * 1024
    max_batch_lines: int = 50_000
    batch_concurrency: int | None = None
    root_path: str = ""
    log_level: str = "info"

    def model_names(self, own: str) -> list[str]:
        """The names under which clients may ask for a model whose `own` name is this; the first is what answers
        carry."""
        return list(self.served_model_name) or [own]
