"""A request as it travels (`GenerateRequest`) and as the scheduler keeps it (`Request`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from octavo.core.params import SamplingParams

if TYPE_CHECKING:
    pass

PLACEHOLDER = -1
"""Among token ids: something other than a token stands here. It never counts as a repetition."""
BACKGROUND = 1 << 30
"""Requests of this `priority` or a higher one run, under every policy, in the room that the others leave."""


def answers_to(request_id: str, name: str) -> bool:
    """Whether a client may mean this request by `name`.

    A server's own ids are those of its answers and a suffix: "chatcmpl-NAME-1f2e...", of which "chatcmpl-NAME" and
    "NAME" are known outside.
    """
    answer = request_id.rpartition("-")[0]
    return name in (answer, answer.partition("-")[2], answer.partition("_")[2]) and bool(name)


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a front end asks of an engine core; never changed after it was made.

    Attributes:
        id: unique; not to be used again while anything of the earlier request may still be on its way.
        tokens: the prompt's token ids, at least one; `PLACEHOLDER` where something else stands in place of a token.
        keys: what tells the prompt's tokens from others in the KV cache, if that is not their ids alone: a digest in
            the place of each placeholder.
        params: how to sample; `params.max_tokens` is resolved (not None) by the time it gets here.
        namespace: requests share KV cache only within one namespace (a tenant's salt).
        priority: lower runs earlier, under the priority policy; from `BACKGROUND` on, under all.
        arrival: `time.monotonic()` when the request reached the front end.
        options: feature name -> that feature's own struct, encoded; core passes it on unread.
        prompt_only: it ends once its prompt is computed; nothing is sampled, whatever `params` say.
        reads_cache: it may use KV that others computed. Not where something is wanted of every token of the prompt.
    """

    id: str
    tokens: list[int]
    params: SamplingParams
    keys: list[int | bytes] = msgspec.field(default_factory=list)
    namespace: str = ""
    priority: int = 0
    arrival: float = 0.0
    options: dict[str, msgspec.Raw] = msgspec.field(default_factory=dict)
    prompt_only: bool = False
    reads_cache: bool = True
