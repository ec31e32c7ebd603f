"""Environment variables: those that users bring from other servers in other units, and those without an effect."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterator, Mapping

from octavo.core.profiling import FOLDER_VARIABLES

PREFIX = "VLLM_"
_OURS = "OCTAVO_"
_OF_KUBERNETES = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_\d+_(TCP|UDP|SCTP)")
"""What it sets in every container beside a service that is called octavo."""
_READ_ELSEWHERE = frozenset({"OCTAVO_CACHE", "OCTAVO_DATA", "OCTAVO_KERNEL_CACHE", *FOLDER_VARIABLES})


def _gibibytes(text: str) -> str:
    """A number of GiB as a size; 0 leaves the choice to us, as it does there."""
    return f"{text}GiB" if text.strip() not in ("", "0") else ""


OTHER_WORDS: Mapping[str, Mapping[str, Callable[[str], str]]] = {
    "kv-cache-memory-bytes": {"VLLM_CPU_KVCACHE_SPACE": _gibibytes},
}
"""Flag -> variable -> its value in the flag's words, or an empty text for no value."""

_ONE_PROCESS = "the engine runs in one process of its own"
_NO_COMPILE = "models are not compiled"
_NO_TELEMETRY = "nothing is ever reported to anybody"
_NEEDLESS: Mapping[str, str] = {
    "NO_USAGE_STATS": _NO_TELEMETRY,
    "DO_NOT_TRACK": _NO_TELEMETRY,
    "USAGE_SOURCE": _NO_TELEMETRY,
    "USE_V1": "there is one engine",
    "WORKER_MULTIPROC_METHOD": _ONE_PROCESS,
    "ENABLE_V1_MULTIPROCESSING": _ONE_PROCESS,
    "HOST_IP": "there is one host; --host says where the server listens",
    "PORT": "it never set the server's port; --port does",
    "DISABLE_COMPILE_CACHE": _NO_COMPILE,
    "TORCH_COMPILE_LEVEL": _NO_COMPILE,
    "ATTENTION_BACKEND": "see --attention-backend, which knows its names",
    "ENGINE_READY_TIMEOUT_S": "the server waits for its engine as long as that lives",
    "ENGINE_ITERATION_TIMEOUT_S": "see --stall-after",
    "ALLOW_LONG_MAX_MODEL_LEN": "a context that is longer than the model's is refused",
    "ENABLE_RESPONSES_API_STORE": "responses are kept unless a request says `store: false`",
    "CACHE_ROOT": "set OCTAVO_CACHE",
    "USE_MODELSCOPE": "models come from Hugging Face, or from a folder",
    "ALLOW_RUNTIME_LORA_UPDATING": "LoRA adapters are not supported by this version",
    "LORA_RESOLVER_CACHE_DIR": "LoRA adapters are not supported by this version",
    "PLUGINS": "plugins are not supported by this version",
    "IMAGE_FETCH_TIMEOUT": "images are not supported by this version",
    "AUDIO_FETCH_TIMEOUT": "audio is not supported by this version",
    "VIDEO_FETCH_TIMEOUT": "video is not supported by this version",
    "BATCH_INVARIANT": "see docs/gpu.md on what makes answers repeatable",
}


def notices(environ: Mapping[str, str], read: Collection[str]) -> Iterator[str]:
    """A line for each variable of ours, or of the other server's, that changes nothing here.

    Args:
        read: our own variables that set flags; those of the other server's of the same ending are read.
    """
    ours = {name.removeprefix(_OURS) for name in read}
    others = {name for names in OTHER_WORDS.values() for name in names} | _READ_ELSEWHERE
    for name in sorted(environ):
        if _is_ours(name, environ[name]) and name not in read and name not in others:
            near = difflib.get_close_matches(name, [*read, *_READ_ELSEWHERE], n=1, cutoff=0.8)
            hint = f"; did you mean {near[0]}?" if near else "; docs/configuration.md lists those there are"
            yield f"{name} has no effect: there is no such variable{hint}"
        ending = name.removeprefix(PREFIX)
        if ending == name or ending in ours or name in others or not environ[name]:
            continue
        yield f"{name} has no effect: {_NEEDLESS.get(ending, 'this server has no such setting')}"


def _is_ours(name: str, value: str) -> bool:
    of_kubernetes = _OF_KUBERNETES.search(name) or value.startswith(("tcp://", "udp://", "sctp://"))
    return name.startswith(_OURS) and value != "" and not of_kubernetes
