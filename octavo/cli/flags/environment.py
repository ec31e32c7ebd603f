"""Environment variables: those of other servers, in other units, and those without an effect."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping

from octavo.core.profiling import FOLDER_VARIABLES

PREFIX = "VLLM_"
_OURS = "OCTAVO_"
_OF_KUBERNETES = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_\d+_(TCP|UDP|SCTP)")
"""Variables that Kubernetes sets in every container near a service named octavo."""
_READ_ELSEWHERE = frozenset({"OCTAVO_CACHE", "OCTAVO_DATA", "OCTAVO_KERNEL_CACHE", *FOLDER_VARIABLES})


def _gibibytes(text: str) -> str:
    """Convert a number of GiB to a size; 0 selects the default, as in the other server."""
    return f"{text}GiB" if text.strip() not in ("", "0") else ""


OTHER_WORDS: Mapping[str, Mapping[str, Callable[[str], str]]] = {
    "kv-cache-memory-bytes": {"VLLM_CPU_KVCACHE_SPACE": _gibibytes},
}
"""Flag -> variable -> function that converts its value to the flag's form; an empty text means no value."""

_NO_COMPILE = "only --compilation uses torch.compile"
_NO_TELEMETRY = "there is no telemetry"
_NEEDLESS: Mapping[str, str] = {
    "NO_USAGE_STATS": _NO_TELEMETRY,
    "DO_NOT_TRACK": _NO_TELEMETRY,
    "USAGE_SOURCE": _NO_TELEMETRY,
    "USE_V1": "there is one engine",
    "WORKER_MULTIPROC_METHOD": "processes are always spawned, never forked",
    "ENABLE_V1_MULTIPROCESSING": "the engine of a server always has a process of its own",
    "HOST_IP": "--host says where the server listens, --master-addr where other nodes reach node 0",
    "PORT": "it does not set the server's port; use --port",
    "DISABLE_COMPILE_CACHE": _NO_COMPILE,
    "TORCH_COMPILE_LEVEL": _NO_COMPILE,
    "ATTENTION_BACKEND": "use --attention-backend, which accepts its names",
    "ENGINE_READY_TIMEOUT_S": "the server waits for its engine as long as it is alive",
    "ENGINE_ITERATION_TIMEOUT_S": "see --stall-after",
    "ALLOW_LONG_MAX_MODEL_LEN": "a context longer than the model's is refused",
    "ENABLE_RESPONSES_API_STORE": "responses are kept unless a request says `store: false`",
    "CACHE_ROOT": "set OCTAVO_CACHE",
    "USE_MODELSCOPE": "models come from Hugging Face, or from a folder",
    "LORA_RESOLVER_CACHE_DIR": "use --lora-dir",
    "PLUGINS": "plugins are not supported by this version",
    "BATCH_INVARIANT": "on a CPU, answers never depend on the batch (docs/cpu.md); on a GPU they may",
}


def notices(environ: Mapping[str, str], read: Collection[str]) -> Iterator[str]:
    """Yield a notice for each variable of Octavo, or of the other server, that has no effect.

    Args:
        read: Octavo's variables that set flags; the other server's variables with the same suffix are read too.
    """
    ours = {name.removeprefix(_OURS) for name in read}
    others = {name for names in OTHER_WORDS.values() for name in names} | _READ_ELSEWHERE
    for name in sorted(environ):
        if _is_ours(name, environ[name]) and name not in read and name not in others:
            import difflib  # only an error needs it

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
