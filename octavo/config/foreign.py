"""Flags and keyword arguments of other engines that Octavo doesn't have.

Flags and arguments are refused if their feature is not supported, and accepted with a notice if they are not needed.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Any

from octavo.core.errors import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Missing:
    """An unsupported feature: refused with `reason`, unless the value requests nothing or the default."""

    reason: str
    neutral: frozenset[str] = frozenset()
    takes_value: bool = True


@dataclass(frozen=True, slots=True)
class Needless:
    """A flag without effect: accepted with `notice`, which gives the reason. `no_reason` refuses its `--no-` form."""

    notice: str
    takes_value: bool = False
    no_reason: str | None = None


_FUSED = "kernels are fused already; --compilation is for models that transformers computes"


def _one(what: str) -> Missing:
    return Missing(f"{what} is not supported by this version", frozenset({"1"}))


def _value(what: str, *neutral: str) -> Missing:
    return Missing(f"{what} not supported by this version", frozenset(neutral))


def _switch(what: str) -> Missing:
    return Missing(f"{what} not supported by this version", takes_value=False)


_CONTEXT = Missing(
    "context parallelism is for prompts (--prefill-context-parallel-size) and not supported for decoding by this "
    "version; --tensor-parallel-size divides attention by heads",
    frozenset({"1"}),
)
_ONE_ENGINE = "there is one engine with one execution mode"

_MODEL: dict[str, Missing | Needless] = {
    "code-revision": Needless("code is run from the model's own folder only", takes_value=True),
    "hf-token": Missing(
        "a token on the command line can be read by other users and is not supported: set the variable HF_TOKEN"
    ),
    "hf-config-path": _value("a separate config location is"),
    "config-format": _value("another config format is", "auto", "hf"),
    "model-loader-extra-config": _value("extra loader settings are", "{}"),
    "ignore-patterns": Needless("only the needed files are downloaded", takes_value=True),
    "use-tqdm-on-load": Needless("progress is shown only on a terminal"),
    "mm-processor-cache-gb": Needless("only encoded images are kept (--mm-encoder-cache-gb)", takes_value=True),
    "max-loras-per-batch": Needless("a step takes any number of adapters that are in memory", takes_value=True),
    "lora-dtype": _value("another dtype for adapters than the model's is", "auto"),
    "fully-sharded-loras": Needless("each rank keeps only its part of an adapter"),
    "enable-lora-bias": _switch("biases of adapters are"),
    "calculate-kv-scales": Needless("scales of an FP8 KV cache are measured if the checkpoint has none"),
}
_ENGINE: dict[str, Missing | Needless] = {
    "data-parallel-backend": Missing(
        "this flag is not supported: --distributed-executor-backend ray starts replicas on a Ray cluster",
        frozenset({"mp"}),
    ),
    "data-parallel-rank": Missing(
        "a server that is one of several replicas is not supported: one server starts them all (--data-parallel-size)",
        frozenset({"0"}),
    ),
    "data-parallel-size-local": Missing(
        "this flag is not supported: replicas are on one machine, or where a Ray cluster has devices "
        "(--distributed-executor-backend ray). Leave it out",
    ),
    "dbo-decode-token-threshold": Needless("--enable-dbo divides steps with prompts only", takes_value=True),
    "enable-eplb": _switch("balancing experts over ranks is"),
    "max-parallel-loading-workers": Needless("each device's process reads its own part", takes_value=True),
    "ray-workers-use-nsight": Needless("no model runs in Ray's own processes"),
    "weight-transfer-config": _value("sending weights other than by files is", '{"backend": "disk"}'),
    "worker-cls": _value("another worker is", "auto"),
    "worker-extension-cls": _value("a worker extension is", ""),
    "scheduler-cls": _value("another scheduler is"),
    "prefix-caching-hash-algo": Needless("blocks are compared by their tokens, not by a hash", takes_value=True),
    "max-num-partial-prefills": Needless("--max-num-batched-tokens is the only bound", takes_value=True),
    "max-long-partial-prefills": Needless("--max-num-batched-tokens is the only bound", takes_value=True),
    "long-prefill-token-threshold": Needless("--max-num-batched-tokens is the only bound", takes_value=True),
    "scheduler-reserve-full-isl": Needless(
        "a request starts when there is room for its whole prompt",
        no_reason="a request starts only when there is room for its whole prompt",
    ),
    "num-lookahead-slots": Needless("the number of drafts follows from --spec-tokens", takes_value=True),
    "num-scheduler-steps": _one("more than one step per plan"),
    "multi-step-stream-outputs": Needless(_ONE_ENGINE),
    "scheduler-delay-factor": _value("delaying prompts is", "0", "0.0"),
    "use-v2-block-manager": Needless(_ONE_ENGINE),
    "disable-async-output-proc": Needless("see --no-async-scheduling"),
    "max-seq-len-to-capture": Needless("graphs are captured for decoding of any length", takes_value=True),
    "cudagraph-capture-sizes": Needless("graphs are recorded at fixed batch sizes, up to 1,024", takes_value=True),
    "tokenizer-pool-size": Needless("long texts are tokenized in threads", takes_value=True),
    "tokenizer-pool-type": Needless("long texts are tokenized in threads", takes_value=True),
    "additional-config": _value("additional settings are", "{}"),
    "speculative-model": _value("this flag (another name of --spec-model) is"),
    "num-speculative-tokens": _value("this flag (another name of --spec-tokens) is"),
    "kv-offloading-backend": _value("another place for KV blocks than the host's memory is", "native"),
    "collect-detailed-traces": Needless("a trace always contains queue, prefill and decode", takes_value=True),
    "show-hidden-metrics-for-version": Needless("no metric is hidden", takes_value=True),
    "disable-hybrid-kv-cache-manager": Needless(_ONE_ENGINE),
}
_SERVER: dict[str, Missing | Needless] = {
    "headless": Missing(
        "an engine without a server is not supported; --node-rank starts the other machines of a model",
        takes_value=False,
    ),
    "exclude-tools-when-tool-choice-none": Needless("the prompt never contains tools that may not be called"),
    "tool-strict-level": Needless("calls always match the tools' schemas", takes_value=True),
    "tool-server": _value("tools run by the server are"),
    "enable-reasoning": Needless("reasoning is separated if the model marks it"),
    "enable-request-id-headers": Needless("every response has X-Request-Id"),
    "enable-server-load-tracking": Needless("/load always answers"),
    "enable-offline-docs": Needless("the page /docs never needs the Internet"),
    "log-error-stack": Needless("unexpected errors are always logged with their stack trace"),
    "h11-max-incomplete-event-size": Needless("headers are bounded by another parser of HTTP", takes_value=True),
    "h11-max-header-count": Needless("headers are bounded by another parser of HTTP", takes_value=True),
    "disable-frontend-multiprocessing": Needless("server and engine are always separate processes"),
}

FLAGS: dict[str, Missing | Needless] = {
    **_MODEL,
    **_ENGINE,
    **_SERVER,
    "decode-context-parallel-size": _CONTEXT,
    "kv-events-config": _value("publishing of KV cache events is"),
    "guided-decoding-backend": Needless("one backend serves every form of output", takes_value=True),
    "task": _value("the older name of --runner (for embeddings say --runner pooling) is", "auto", "generate"),
    "tokenizer-mode": _value("another tokenizer mode is", "auto", "hf"),
    "enable-auto-tool-choice": Needless("automatic tool choice is always enabled"),
    "swap-space": Needless(
        "KV blocks are kept in the host's memory by --kv-offloading-size, not only those of preempted requests",
        takes_value=True,
    ),
    "preemption-mode": Needless("preemption is by recompute, helped by the prefix cache", takes_value=True),
    "disable-log-requests": Needless("requests are logged only with --enable-log-requests"),
    "enable-chunked-prefill": Needless(
        "long prompts are always computed in chunks",
        no_reason="long prompts are always computed in chunks; raise --max-num-batched-tokens to have fewer of them",
    ),
    "optimization-level": Needless(_FUSED, takes_value=True),
    "compilation-config": Needless(_FUSED, takes_value=True),
}

ENGINE_FLAGS = {name: entry for name, entry in FLAGS.items() if name not in _SERVER}
"""The flags that also apply without a server."""

SHORT = {
    "-dcp": "decode-context-parallel-size",
    "-cc": "compilation-config",
    "-O": "optimization-level",
}

_NO_LOG = Needless("an engine in a script does not log its load; see LLM.stats()")

# Arguments of vLLM's `LLM` and `AsyncEngineArgs` that do not correspond to a flag above.
_KEYWORDS: dict[str, Missing | Needless] = {
    "disable-log-stats": _NO_LOG,
    "enable-log-requests": _NO_LOG,
    "served-model-name": Needless("only a server uses model names"),
}


def check_keyword(name: str, value: Any) -> bool:
    """Return whether an argument of a Python call is in the table and accepted: it has no effect.

    Raises:
        ConfigError: its feature is not supported; the text gives the reason and the alternative.
    """
    flag = name.replace("_", "-")
    entry = _KEYWORDS.get(flag) or FLAGS.get(flag)
    if entry is None:
        return False
    if isinstance(entry, Needless):
        if value is False and entry.no_reason:
            raise ConfigError(f"{name}=False: {entry.no_reason}.")
        if value not in (None, False):
            log.warning("%s has no effect: %s", name, entry.notice)
        return True
    text = json.dumps(value) if isinstance(value, dict) else str(value)
    if value not in (None, False) and text not in entry.neutral and value != {}:
        raise ConfigError(f"{name}={value!r}: {entry.reason}; leave it out.")
    return True
