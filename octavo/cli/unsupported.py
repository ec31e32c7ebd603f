"""Flags that users bring from other servers: those whose feature is not here yet, and those that need no flag here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Missing:
    """A feature Octavo lacks: refused with `reason`, unless the value asks for nothing but the default."""

    reason: str
    neutral: frozenset[str] = frozenset()
    takes_value: bool = True


@dataclass(frozen=True, slots=True)
class Needless:
    """A flag that changes nothing here: accepted, and `notice` says why. `no_reason` refuses its `--no-` form."""

    notice: str
    takes_value: bool = False
    no_reason: str | None = None


def _one(what: str) -> Missing:
    return Missing(f"{what} is not supported by this version: it runs one model on one device", frozenset({"1"}))


def _value(what: str, *neutral: str) -> Missing:
    return Missing(f"{what} not supported by this version", frozenset(neutral))


def _switch(what: str) -> Missing:
    return Missing(f"{what} not supported by this version", takes_value=False)


_TLS = "TLS is not served by Octavo itself: put a reverse proxy in front of it"
_LORA = "LoRA adapters are"

FLAGS: dict[str, Missing | Needless] = {
    "tensor-parallel-size": _one("tensor parallelism"),
    "pipeline-parallel-size": _one("pipeline parallelism"),
    "data-parallel-size": _one("data parallelism"),
    "decode-context-parallel-size": _one("context parallelism"),
    "prefill-context-parallel-size": _one("context parallelism"),
    "api-server-count": _one("more than one API process"),
    "enable-expert-parallel": _switch("expert parallelism is"),
    "distributed-executor-backend": _value("a distributed executor is", "uni"),
    "quantization": _value("quantized computation is (a GGUF file is dequantized as it loads)", "none", "None", "auto"),
    "enable-lora": _switch(_LORA),
    "lora-modules": _value(_LORA),
    "max-loras": _value(_LORA),
    "max-lora-rank": _value(_LORA),
    "max-cpu-loras": _value(_LORA),
    "speculative-config": _value("speculative decoding is"),
    "spec-method": _value("speculative decoding is"),
    "kv-transfer-config": _value("transfer of KV cache between servers is"),
    "kv-events-config": _value("publishing of KV cache events is"),
    "kv-offloading-size": _value("offloading of the KV cache is", "0"),
    "cpu-offload-gb": _value("offloading of weights is", "0", "0.0"),
    "structured-outputs-config": _value(
        "another backend of structured output is", "auto", "guidance", '{"backend": "auto"}'
    ),
    "structured-outputs-config.backend": _value("another backend of structured output is", "auto", "guidance"),
    "guided-decoding-backend": _value("another backend of structured output is", "auto", "guidance"),
    "tool-parser-plugin": _value("plugins for parsing of tool calls are"),
    "runner": _value("any runner but text generation is", "auto", "generate"),
    "convert": _value("conversion of a model to another task is", "auto", "none"),
    "task": _value("any task but text generation is", "auto", "generate"),
    "tokenizer-mode": _value("another tokenizer mode is", "auto", "hf"),
    "model-impl": _value("another model implementation is", "auto"),
    "hf-overrides": _value("overriding of the model's config is", "{}"),
    "generation-config": _value("another place for the generation config is", "auto"),
    "override-generation-config": _value("overriding of the generation config is", "{}"),
    "chat-template-content-format": _value("a fixed content format for chat templates is", "auto"),
    "limit-mm-per-prompt": _value("images, audio and video are"),
    "allowed-local-media-path": _value("images, audio and video are", ""),
    "enable-sleep-mode": _switch("sleep mode is"),
    "otlp-traces-endpoint": _value("tracing is"),
    "uds": _value("listening on a Unix socket is"),
    "middleware": _value("middleware is"),
    "enable-log-outputs": _switch("logging of outputs is"),
    "ssl-keyfile": Missing(_TLS),
    "ssl-certfile": Missing(_TLS),
    "ssl-ca-certs": Missing(_TLS),
    "enable-auto-tool-choice": Needless("the model may always choose to call the tools of a request"),
    "trust-remote-code": Needless("Octavo never runs code that comes with a model"),
    "swap-space": Needless("there is no swap space: preempted requests are recomputed", takes_value=True),
    "preemption-mode": Needless("preemption is by recompute, helped by the prefix cache", takes_value=True),
    "disable-log-requests": Needless("requests are logged only with --enable-log-requests"),
    "enable-chunked-prefill": Needless(
        "long prompts are always computed in chunks",
        no_reason="long prompts are always computed in chunks; raise --max-num-batched-tokens to have fewer of them",
    ),
    "optimization-level": Needless("this version does not compile the model", takes_value=True),
    "compilation-config": Needless("this version does not compile the model", takes_value=True),
    "performance-mode": Needless("there is one mode", takes_value=True),
}

SHORT = {
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-pcp": "prefill-context-parallel-size",
    "-dcp": "decode-context-parallel-size",
    "-asc": "api-server-count",
    "-q": "quantization",
    "-sc": "speculative-config",
    "-cc": "compilation-config",
    "-O": "optimization-level",
}
