"""Settings: one frozen dataclass for each floor. Below `build.py`, a floor sees only its own."""

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

# Settings whose flag (and vLLM keyword) differs from the field name.
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
"""Parsers of numbers given as text, such as "8k" or "2GiB"; the command line uses the same ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model to run, and how.

    Attributes:
        model: a catalogue name, a folder, a .gguf file or a Hugging Face id.
        tokenizer: where to take the tokenizer from, if not from the model.
        tokenizer_revision: its revision; None takes the model's, or the newest one if it is in another repository.
        allow_special_in_content: parse special tokens spelled out in message contents.
        skip_tokenizer_init: accept and return only token ids, without a tokenizer.
        download_dir: where downloaded models are kept; None takes the cache folders of `hub/cache.py` and Hugging Face.
        hf_overrides: values that replace fields of the model's config before anything reads it.
        rope_scaling, rope_theta: the same for two fields, by their older flags.
        disable_sliding_window: use full attention in all layers and limit the context to the model's window.
        dtype: "auto" takes the checkpoint's, or float32 on machines without fast bfloat16; quantized weights stay
            integers if the machine has kernels for them. All weights are converted to any other dtype.
        activation_dtype: rounding of activations that are multiplied by integer weights (on a CPU, if no dtype is
            set): "int16" is as exact as bfloat16, "int8" computes prompts up to twice as fast. "bfloat16" also rounds
            the weights to bfloat16 in each product: with AMX the fastest for prompts and batches, but not for a
            single request.
        load_format: "auto" goes by the files found; "dummy" makes random weights.
        max_model_len: None takes the model's, reduced to what the KV cache holds.
        runner: "generate" text, or only compute embeddings ("pooling"); "auto" goes by the checkpoint.
        convert: the task to convert the model to: "embed" for embeddings; "auto" goes by the checkpoint.
        max_logprobs: the largest `logprobs` that a request may ask for; -1 for no limit.
        logprobs_mode: what `logprobs` report: log-probabilities or logits, "raw" (of the model) or "processed" (after
            penalties, bans, temperature and filters).
        stream_interval: tokens of a choice in each streamed chunk; requests may ask for more.
        generation_config: where sampling defaults come from: "auto" for the model's generation_config.json, a folder
            with another one, or "none" (also "vllm") for the defaults of `SamplingParams`.
        override_generation_config: individual defaults that replace those, such as {"temperature": 0.5}.
        enable_sleep_mode: allow requests that release the memory of KV cache and weights until a wake-up.
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
        """Return the overridden fields of the model's config and their values, from all three settings.

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
        kv_cache_dtype: storage dtype of keys and values: "auto" is the model's; "fp8" is "fp8_e4m3";
            "int8_per_token_head" is "int8".
        memory_bytes: size of the cache; None takes what `memory_utilization` leaves after the weights.
        num_blocks: size in blocks, regardless of `memory_utilization`; at most `memory_bytes` if that is set.
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
        watermark: fraction of the KV cache to keep free when admitting a request while others run.
        policy: a name in `schedule/policy.py`.
        depth: steps launched ahead of the oldest unread one: 0 is synchronous, 1 overlaps; None lets the device choose.
    """

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    watermark: float = 0.0
    policy: str = "fcfs"
    depth: int | None = None

    def limits(self, default_seqs: int, default_tokens: int) -> tuple[int, int]:
        """Return the most sequences and tokens of a step; if only one is set, adjust the other's default to fit."""
        tokens = self.max_num_batched_tokens or max(default_tokens, self.max_num_seqs or 0)
        return self.max_num_seqs or min(default_seqs, tokens), tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    """Where the model runs.

    Attributes:
        threads: compute threads on a CPU; None takes the physical cores given to this process.
        cpu_bind: cores to bind the threads to on a CPU: "auto", "nobind" or a list (0-3,8); see `device/binding.py`.
        cpu_isa: the instruction set of the CPU kernels: "auto" or a name in `native/isa.py`.
        enforce_eager: launch every operation of every step; otherwise a GPU replays recorded CUDA graphs.
        disable_cascade_attn: decode each request over its whole context on a GPU; otherwise a shared prefix is read
            once for all requests that have it.
        distributed_executor_backend: "uni" runs the model in the engine's process, "mp" in a process of its own.
        record_steps: a file for every plan, payload and output, to compute them again; see `engine/record.py`.
        record_steps_limit: size limit of that file in bytes.
        profiler_config: where profiles are written and what they hold; see `core/profiling.py`. Empty uses the
            environment variable for the folder.
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
    """All settings of an engine core.

    Attributes:
        features: feature name -> its settings, for the features that have any.
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
        """Build a config from keywords named like the fields, or like the command-line flags where these differ.

        None takes the default. Settings of other engines are refused, or ignored with a warning: see `foreign`.

        Raises:
            TypeError: an unknown setting; the text suggests similar names.
            ConfigError: a value out of the setting's type or range.
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
        """Restore a config from the output of `msgspec.to_builtins`.

        Raises:
            msgspec.ValidationError: another version of Octavo wrote it.
        """
        own = plain.get("features", {})
        features = {name: msgspec.convert(own.get(name, {}), kind) for name, kind in settings_types().items()}
        kinds = get_type_hints(cls)
        floors = {name: msgspec.convert(plain[name], kinds[name]) for name in plain if name != "features"}
        return cls(**floors, features=features)

    @property
    def needs_weights(self) -> bool:
        """Whether weight files are read."""
        return self.model.load_format != "dummy"


def _unknown(given: str, known: list[str]) -> TypeError:
    """Return the error for an unknown setting, with a hint if it is a parameter of requests."""
    if given in SamplingParams.__struct_fields__:
        return TypeError(f"there is no setting {given!r}; it belongs to a request: SamplingParams({given}=...)")
    hint = near(given, known, most=3) or near(given, SamplingParams.__struct_fields__, cutoff=0.8)
    return TypeError(f"there is no setting {given!r}{hint}")


def _by_other_words(name: str, given: str, value: Any) -> Any:
    """Convert spellings that scripts and other engines use to the field's own value."""
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
    """Raise ConfigError unless a value has the field's type and range; command-line flags are checked earlier."""
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
    """The HTTP server. Sizes in bytes, times in seconds.

    Attributes:
        api_server_count: processes that answer HTTP, all on the same address and with the same engine.
        tool_call_parser, reasoning_parser: output format of tool calls and reasoning; "auto" goes by the chat template.
        tool_parser_plugin: a Python file that declares more formats of tool calls.
        reasoning_config: other markers of reasoning: `reasoning_start_str` and `reasoning_end_str`.
        api_key_file: more keys, one a line.
        allowed_origins, allowed_methods, allowed_headers, allow_credentials: what pages of other sites may do (CORS);
            nothing without an origin.
        middleware: the user's ASGI middleware, as "package.module.name"; the last is outermost.
        max_num_queued_reqs, max_num_queued_tokens: most requests and tokens waiting before new ones are refused.
        response_role: role of the messages in chat answers, unless they continue a message.
        chat_template_content_format: form of message contents in the template: a string, or a list of parts
            ("openai"); "auto" goes by the template's code.
        default_chat_template_kwargs: variables for the chat template that a request does not set.
        return_tokens_as_token_ids: write tokens in logprobs as `token_id:7`; requests can ask for it too.
        disable_log_stats: do not log throughput and load.
        strict_params: refuse unknown request fields instead of naming them in `warnings`.
        max_prompts: prompts in one request to /v1/completions.
        max_inputs: inputs in one request for embeddings, documents in one rerank.
        max_schema_bytes: size of a schema or grammar in a request.
        enable_per_request_metrics: report a request's timings in its answer.
        otlp_traces_endpoint: the collector that traces are sent to; None for no traces.
        fingerprint_mode, fingerprint_value: the `system_fingerprint` of answers: made of version, model and device
            ("full" and "hash"), the value ("custom"), or none.
        enable_log_requests: log a line at the end of every request (otherwise only at level debug), and its prompt at
            level debug.
        enable_log_outputs: also log the generated text, with `enable_log_deltas` each piece as it is streamed.
        max_log_len: most characters or token ids to log of each prompt and output; None for all.
        log_config_file: JSON for `logging.config.dictConfig`, in place of `log_level`.
        configure_logging: whether to set up logging.
        disable_uvicorn_access_log, disable_access_log_for_endpoints: do not log HTTP requests (level debug), at all
            or to these paths.
        trust_request_chat_template: let requests bring their own chat template.
        enable_tokenizer_info_endpoint: serve /tokenizer_info, chat template and all.
        skip_model_name_validation: answer requests for models of any name.
        server_dev_mode: serve the routes for development: /reset_prefix_cache, /server_info and the like.
        max_unread_tokens: tokens of a request that a slow client may leave unread before the request is ended.
        unread_timeout_s: how long a client may leave data unread before its connection is closed.
        sse_keep_alive_s: interval of comments on a silent stream, which keep proxies from closing it; 0 for none.
        jobs_dir: where uploaded files and batches are kept; None takes jobs/ in the user's folder for Octavo's data.
        max_file_bytes: the largest upload.
        max_batch_lines: requests in one batch.
        batch_concurrency: batch requests running at once; None takes the engine's `max_num_seqs`.
        uds: a socket file to listen on instead of host and port.
        ssl_certfile, ssl_keyfile, ssl_keyfile_password: PEM files of the server's certificate and key; a certificate
            turns TLS on. The key may be in the certificate's file.
        ssl_ca_certs, ssl_cert_reqs: authorities of client certificates, and whether clients need one: 0 no,
            1 optional, 2 required.
        enable_ssl_refresh: read certificate and key again when their files change.
        max_concurrent_requests: requests served at once before others get a 503; None for no limit.
        keep_alive_s: time until an idle connection is closed. The default exceeds that of common clients, so that
            the client closes first.
        body_timeout_s: time limit for a request's headers, and then for its body, plus a second for each 16 KiB
            received.
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
        """Return the names that requests may use for a model named `own`; answers carry the first."""
        return list(self.served_model_name) or [own]
