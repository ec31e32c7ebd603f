"""Settings of the KV cache."""

from dataclasses import dataclass
from typing import Literal

from octavo.core import quantities
from octavo.core.flag import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The KV cache.

    Attributes:
        block_size: None takes 16, or a multiple if the states of a model's recurrent layers need larger blocks.
        kv_cache_dtype: "auto" is the model's dtype, "fp8" is "fp8_e4m3", "int8_per_token_head" is "int8".
        memory_bytes: None takes what `memory_utilization` leaves after the weights.
        num_blocks: regardless of `memory_utilization`; at most `memory_bytes` if that is set.
        memory_utilization: None takes the device's default.
        models_on_device: None for an engine that has the device to itself.
        cpu_offload_gb: GiB of each GPU's memory; see `worker/offload.py`.
    """

    block_size: int | None = setting(
        None,
        "tokens in one block of the KV cache",
        shown="16, or more if a recurrent layer's state needs it",
        read=quantities.count,
        metavar="TOKENS",
    )
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "int8_per_token_head"] = setting(
        "auto", "dtype that keys and values are stored in; fp8 (fp8_e4m3) halves their memory on a GPU, int8 on a CPU"
    )
    memory_bytes: int | None = setting(
        None,
        "size of the KV cache (512MiB, 2G, plain bytes)",
        flag="kv-cache-memory-bytes",
        shown="what memory utilization leaves",
        read=quantities.size,
        metavar="BYTES",
    )
    num_blocks: int | None = setting(
        None,
        "size of the KV cache in blocks, on any device",
        flag="num-gpu-blocks-override",
        shown="what the memory holds",
        read=quantities.count,
        metavar="N",
    )
    memory_utilization: float | None = setting(
        None,
        "fraction of the device's memory for weights and KV cache (on a CPU, of the free memory)",
        flag="gpu-memory-utilization",
        shown="0.92; on a CPU 0.5, for a KV cache of at most 4 GiB",
        read=quantities.fraction,
        metavar="FRACTION",
        aliases=("memory-utilization",),
    )
    models_on_device: int | None = setting(
        None,
        "models that are loaded on the device at once, each by an engine of its own: this engine takes an N-th of the "
        "memory that it would take by default, and can be put to sleep",
        shown="only this one",
        read=quantities.count,
        metavar="N",
    )
    cpu_offload_gb: float = setting(
        0.0,
        "GiB of each GPU's memory to free by keeping weights in the host's memory, from where each step copies them",
        read=quantities.gibibytes,
        metavar="GIB",
    )
    enable_prefix_caching: bool = setting(True, "share the KV cache of common prefixes between requests")
