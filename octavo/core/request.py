"""`GenerateRequest`: a request from a front end to an engine core."""

from __future__ import annotations

import msgspec

from octavo.core.params import SamplingParams

PLACEHOLDER = -1
"""Among token ids: a position with other content than a token. It never counts as a repetition."""
BACKGROUND = 1 << 30
"""Requests of this `priority` or a higher one run, under every policy, only with resources that others leave."""


def answers_to(request_id: str, name: str) -> bool:
    """Return whether a client may refer to this request by `name`.

    A server's request id is the id of its response and a suffix, such as "chatcmpl-NAME-1f2e...". Clients use
    "chatcmpl-NAME" or "NAME".
    """
    answer = request_id.rpartition("-")[0]
    return name in (answer, answer.partition("-")[2], answer.partition("_")[2]) and bool(name)


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A front end's request to an engine core; immutable.

    Attributes:
        id: unique; don't reuse it while messages of an earlier request may still be in transit.
        tokens: the prompt's token ids, at least one; `PLACEHOLDER` for other content than a token.
        keys: identify the prompt's tokens in the KV cache, if token ids don't suffice: a digest for each placeholder.
            Empty if they do.
        params: sampling parameters.
        namespace: requests share KV cache only within one namespace (a tenant's salt).
        priority: lower runs earlier, under the priority policy; from `BACKGROUND` on, under all policies.
        tenant: whose share of the engine it takes, under the fair policy; "" for requests that name none.
        arrival: `time.monotonic()` when the request reached the front end.
        options: feature name -> that feature's struct, encoded; the core passes it on undecoded.
        prompt_only: end the request once its prompt is computed, without sampling.
        added_tokens: how many token ids beyond the model's vocabulary it may use. The scheduler sets it.
        unbroken: [start, end) ranges of prompt positions, ascending and disjoint, each computed in one step. The
            scheduler sets it.
        reads_cache: it may use KV that others computed; False if a result is needed for every token of the prompt.
    """

    id: str
    tokens: list[int]
    params: SamplingParams
    keys: list[int | bytes] = msgspec.field(default_factory=list)
    namespace: str = ""
    priority: int = 0
    tenant: str = ""
    arrival: float = 0.0
    options: dict[str, msgspec.Raw] = msgspec.field(default_factory=dict)
    prompt_only: bool = False
    added_tokens: int = 0
    unbroken: list[tuple[int, int]] = msgspec.field(default_factory=list)
    reads_cache: bool = True
