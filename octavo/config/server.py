"""Settings of the HTTP server."""

import operator
from dataclasses import dataclass
from typing import Any, Literal

from octavo.config.log import LogConfig
from octavo.core import parsing, quantities
from octavo.core.errors import ConfigError
from octavo.core.flag import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(LogConfig):
    """The HTTP server. Sizes are in bytes, times in seconds.

    Attributes:
        ssl_certfile, ssl_keyfile: TLS is used if a certificate is given; its file may also contain the key.
        middleware: the last is outermost.
        max_inputs: also the documents of one rerank.
        max_log_len: None for all.
        jobs_dir: None takes jobs/ in the user's folder for Octavo's data.
        batch_concurrency: None takes as many as the engine's sequences.
        keep_alive_s: by default longer than clients keep idle connections, so that they close them.
    """

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 for all")
    port: int = setting(8000, "port to listen on", read=parsing.port, metavar="PORT")
    uds: str | None = setting(None, "a socket file to listen on instead of host and port", metavar="PATH")
    api_server_count: int = setting(
        1,
        "processes that answer HTTP; use more if one CPU core can't keep up with the streams",
        read=quantities.count,
        metavar="N",
        aliases=("-asc",),
    )
    ssl_certfile: str | None = setting(None, "PEM file with the server's certificate", shown="no TLS", metavar="FILE")
    ssl_keyfile: str | None = setting(
        None, "PEM file with the certificate's key", shown="in the certificate's file", metavar="FILE"
    )
    ssl_keyfile_password: str | None = setting(
        None, "password of the key file", shown="none", metavar="TEXT", env="OCTAVO_SSL_KEYFILE_PASSWORD"
    )
    ssl_ca_certs: str | None = setting(
        None, "PEM file with the authorities that sign client certificates", metavar="FILE"
    )
    ssl_cert_reqs: int = setting(
        0, "whether clients need a certificate: 0 no, 1 optional, 2 required", read=quantities.natural, metavar="N"
    )
    ssl_ciphers: str | None = setting(None, "OpenSSL's list of ciphers for TLS 1.2", shown="OpenSSL's", metavar="LIST")
    enable_ssl_refresh: bool = setting(False, "reload certificate and key when their files change")
    served_model_name: tuple[str, ...] = setting(
        (), "names under which clients may request the model", shown="the model's", read=parsing.word, metavar="NAME"
    )
    api_keys: tuple[str, ...] = setting(
        (),
        "API keys; with any, clients must send one of them",
        flag="api-key",
        shown="none",
        read=parsing.word,
        metavar="KEY",
        env="OCTAVO_API_KEY",
    )
    api_key_file: str | None = setting(
        None, "a file with more API keys, one per line; ` name=NAME` after a key names its tenant", metavar="FILE"
    )
    tenant_by: str = setting(
        "api-key",
        "what names the tenant of a request: its API key, its `user` (of messages: `metadata.user_id`), or a header "
        "that your proxy sets (header:NAME); with the last two, clients can invent tenants, unless the proxy prevents "
        "it",
        read=parsing.tenant_by,
        metavar="WHAT",
    )
    allowed_origins: tuple[str, ...] = setting(
        (),
        "origins whose pages may call the server (CORS); * for all",
        read=parsing.origins,
        metavar="ORIGIN",
        convert=parsing.flat,
    )
    allowed_methods: tuple[str, ...] = setting(
        ("*",), "HTTP methods for --allowed-origins", read=parsing.item_or_list, metavar="METHOD", convert=parsing.flat
    )
    allowed_headers: tuple[str, ...] = setting(
        ("*",),
        "request headers for --allowed-origins",
        read=parsing.item_or_list,
        metavar="HEADER",
        convert=parsing.flat,
    )
    allow_credentials: bool = setting(False, "allow cookies from --allowed-origins")
    middleware: tuple[str, ...] = setting(
        (),
        "your own middleware, as package.module.name: an ASGI class, or async def f(request, call_next)",
        metavar="PATH",
    )
    max_num_queued_reqs: int | None = setting(
        None,
        "most sequences that may wait; further requests get a 429",
        shown="no limit",
        read=quantities.natural,
        metavar="N",
    )
    max_num_queued_tokens: int | None = setting(
        None,
        "most prompt tokens that may wait; further requests get a 429",
        shown="no limit",
        read=quantities.count,
        metavar="TOKENS",
    )
    max_tenant_requests: int | None = setting(
        None,
        "most requests that one tenant (--tenant-by) may have here, running or waiting; further ones get a 429",
        shown="no limit",
        read=quantities.count,
        metavar="N",
    )
    strict_params: bool = setting(False, "refuse requests with unknown fields, instead of a warning in the answer")
    chat_template: str | None = setting(None, "a Jinja file, or the template itself", shown="the model's")
    response_role: str = setting(
        "assistant", "role of the messages in answers to chats, unless they continue a message", metavar="ROLE"
    )
    chat_template_content_format: Literal["auto", "string", "openai"] = setting(
        "auto", "how the template gets contents: as a string, or as OpenAI's parts; auto depends on the template's code"
    )
    default_chat_template_kwargs: dict[str, Any] = setting(
        {}, "variables for the chat template, unless a request sets them, as a JSON object"
    )
    return_tokens_as_token_ids: bool = setting(
        False, "write tokens in logprobs as `token_id:7`", shown="as requests say"
    )
    tool_call_parser: str = setting(
        "auto", "how the model writes tool calls: auto (by its chat template)", metavar="NAME"
    )
    tool_parser_plugin: str | None = setting(
        None, "your own Python file that declares more formats for --tool-call-parser", metavar="FILE"
    )
    reasoning_parser: str = setting(
        "auto",
        "how the model marks reasoning: auto (by its chat template), none, think, mistral, granite",
        metavar="NAME",
    )
    reasoning_config: dict[str, Any] = setting(
        {}, 'other marks of reasoning, as a JSON object: {"reasoning_start_str": "<a>", "reasoning_end_str": "</a>"}'
    )
    root_path: str = setting("", "path under which a proxy publishes the server", shown="/", metavar="PATH")
    max_concurrent_requests: int | None = setting(
        None,
        "most requests answered at once; further ones get a 503",
        shown="no limit",
        read=quantities.count,
        metavar="N",
    )
    keep_alive_s: int = setting(
        65,
        "how long a connection may be idle before it is closed",
        flag="keep-alive-timeout",
        read=quantities.natural,
        metavar="SECONDS",
        env="OCTAVO_HTTP_TIMEOUT_KEEP_ALIVE",
    )
    body_timeout_s: float = setting(
        60.0,
        "time limit for a request's headers, and for its body plus a second for each 16 KiB; after it, the request "
        "gets a 408",
        flag="body-timeout",
        read=quantities.duration,
        metavar="SECONDS",
    )
    max_body_bytes: int = setting(
        32 * 1024 * 1024,
        "largest request body",
        read=quantities.size,
        metavar="BYTES",
        env="OCTAVO_HTTP_MAX_REQUEST_BODY_SIZE",
    )
    max_stop_strings: int = setting(
        4, "most stop strings in one request", read=quantities.count, metavar="N", env="OCTAVO_MAX_STOP_STRINGS"
    )
    max_n: int = setting(
        64, "largest `n` of a request", read=quantities.count, metavar="N", env="OCTAVO_MAX_N_SEQUENCES"
    )
    max_prompts: int = setting(1024, "most prompts in one completions request", read=quantities.count, metavar="N")
    max_inputs: int = setting(2048, "most inputs in one embeddings request", read=quantities.count, metavar="N")
    max_schema_bytes: int = setting(
        1024 * 1024, "largest JSON schema or grammar of a request", read=quantities.size, metavar="BYTES"
    )
    max_unread_tokens: int = setting(
        4096,
        "most tokens that may wait for a slow reader; beyond that its request is ended",
        read=quantities.count,
        metavar="TOKENS",
    )
    unread_timeout_s: float = setting(
        60.0,
        "how long a client may leave data unread before its connection is closed",
        flag="unread-timeout",
        read=quantities.duration,
        metavar="SECONDS",
    )
    sse_keep_alive_s: float = setting(
        0.0,
        "send a comment in streams that have been silent for this long, so that proxies don't close them; 0 for never",
        flag="sse-keep-alive-interval",
        read=quantities.seconds,
        metavar="SECONDS",
    )
    jobs_dir: str | None = setting(None, "folder for uploaded files and batches", shown="~/.local/share/octavo/jobs")
    max_file_bytes: int = setting(
        200 * 1024 * 1024, "largest file that may be uploaded", read=quantities.size, metavar="BYTES"
    )
    max_batch_lines: int = setting(50_000, "most requests in one batch", read=quantities.count, metavar="N")
    batch_concurrency: int | None = setting(
        None,
        "batch requests that run at once, in capacity that other requests leave free",
        shown="the engine's sequences",
        read=quantities.count,
        metavar="N",
    )
    stall_after_s: float = setting(
        120.0,
        "how long work may wait without a step completing before /health fails",
        flag="stall-after",
        read=quantities.duration,
        metavar="SECONDS",
    )
    shutdown_timeout_s: float = setting(
        30.0,
        "how long running requests may continue after a stop signal",
        flag="shutdown-timeout",
        read=quantities.seconds,
        metavar="SECONDS",
    )
    trust_request_chat_template: bool = setting(False, "allow requests to bring their own chat template")
    enable_tokenizer_info_endpoint: bool = setting(False, "serve /tokenizer_info: special tokens and chat template")
    skip_model_name_validation: bool = setting(
        False, "accept any model name in requests, and answer under that name", env="OCTAVO_SKIP_MODEL_NAME_VALIDATION"
    )
    server_dev_mode: bool = setting(
        False,
        "serve the development routes: /reset_prefix_cache, /pause, /sleep, /update_weights_from_disk and others",
        env="OCTAVO_SERVER_DEV_MODE",
    )
    enable_docs: bool = setting(
        True,
        "do not serve /docs, /redoc and /openapi.json, nor the chat page at /",
        flag="disable-fastapi-docs",
        shown="served",
        convert=operator.not_,
    )
    enable_force_include_usage: bool = setting(
        False, "report usage in every chunk of every stream, even if not requested"
    )
    enable_prompt_tokens_details: bool = setting(
        False, "report in usage how many prompt tokens came from the prefix cache"
    )
    enable_per_request_metrics: bool = setting(False, "report a request's timings in `metrics` of its answer")
    fingerprint_mode: Literal["full", "hash", "custom", "none"] = setting(
        "full",
        "`system_fingerprint` of answers: made of version, model and device (full, hash), --fingerprint-value, or none",
    )
    fingerprint_value: str | None = setting(None, "the text for --fingerprint-mode custom")

    def model_names(self, own: str) -> list[str]:
        """Return the names that requests may use for a model named `own`; answers carry the first."""
        return list(self.served_model_name) or [own]

    @property
    def root(self) -> str:
        """`root_path` with a slash before it and none after it; "" for none."""
        stripped = self.root_path.strip("/")
        return f"/{stripped}" if stripped else ""

    def check(self) -> None:
        """Raise ConfigError for settings that have no effect without another one that is not set."""
        plain = ServerConfig()
        for name, needed in _NEEDED.items():
            value = getattr(self, name)
            if value != getattr(plain, name) and not getattr(self, needed):
                flag = f"{'no-' if value is False else ''}{name.replace('_', '-')}"
                needs = needed.replace("_", "-")
                raise ConfigError(f"--{flag} has no effect without --{needs}: set that, too, or leave --{flag} out.")


_NEEDED = {
    "enable_log_outputs": "enable_log_requests",
    "enable_log_deltas": "enable_log_outputs",
    "max_log_len": "enable_log_requests",
    "allowed_methods": "allowed_origins",
    "allowed_headers": "allowed_origins",
    "allow_credentials": "allowed_origins",
}
"""Setting -> the one that it needs."""
