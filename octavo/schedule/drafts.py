"""`DraftBounds`: how many draft tokens may follow the next sampled token of a request, and what rejected ones undo."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.cache.cache import KVCache
from octavo.core.params import SamplingParams
from octavo.core.worker_info import MOST_DRAFTED
from octavo.schedule.hooks import EngineHook, hooks_of, most_drafts
from octavo.schedule.limits import Limits
from octavo.schedule.request import Request


class DraftBounds:
    """The smallest bound of all features, limited by the room in the request and in the step.

    Attributes:
        most: most drafts of a row; 0 if no feature drafts.
        chain: most drafts of a row without branches. More are a whole tree, for requests whose tokens depend on those
            before them by the model's logits alone.
        rewinds: a layer keeps a recurrent state, from which rejected tokens can't be removed: if some of a row's are,
            the sequence goes back to the state before the row, and the next one computes the accepted tokens again.
        writes_ahead: drafts need KV blocks as soon as they are proposed.
    """

    def __init__(self, hooks: Sequence[EngineHook], limits: Limits, cache: KVCache) -> None:
        self.most = most_drafts(hooks)
        self.chain = min((hook.max_chain for hook in hooks if hook.max_chain), default=self.most)
        self.rewinds = self.most > 0 and not all(group.grows for group in cache.groups)
        self.writes_ahead = any(hook.writes_ahead for hook in hooks if hook.max_drafts)
        self._hooks = [hook for hook in hooks if type(hook).drafts is not EngineHook.drafts]
        self._readers = [hook for hook in hooks if type(hook).on_drafts is not EngineHook.on_drafts]
        self._step_tokens = limits.max_num_batched_tokens
        self._cache = cache

    def wanted(self, request: Request) -> int:
        """Return the smallest bound of all features. Sequences in lockstep have no drafts."""
        if request.siblings.lockstep is not None:
            return 0
        bounds = (hook.drafts(request) for hook in self._hooks)
        return max(0, min((bound for bound in bounds if bound is not None), default=self.most))

    def following(self, request: Request, num_running: int, wanted: int | None = None) -> int:
        """Return the number of drafts for a request whose row has just been planned.

        If all of them are accepted, the output is at most `max_tokens` long, so no position beyond the request's last
        is written. If all running requests have as many, their rows fit into one step, and so do their logits. Where a
        whole tree does not fit or is not possible, the request gets a chain.

        Args:
            wanted: the result of `self.wanted(request)`, if it is known.
        """
        left = request.max_tokens - request.num_output - request.pending - 1
        share = min(self._step_tokens // num_running - 1, MOST_DRAFTED * self.most // num_running)
        most = min(self.most, left, share)
        if most <= 0:
            return 0
        most = min(most, self.wanted(request) if wanted is None else wanted)
        whole = most == self.most and not self.reads(request) and not _reads_tokens(request.params)
        return most if whole else min(most, self.chain)

    def reads(self, request: Request) -> bool:
        """Return whether a feature must see the request's drafts before they are verified."""
        return bool(self._readers) and bool(hooks_of(request, self._readers))

    def valid(self, request: Request, drafts: Sequence[int]) -> int:
        """Show the request's drafts to its features; return how many of the first ones all of them leave."""
        return min((hook.on_drafts(request, drafts) for hook in hooks_of(request, self._readers)), default=len(drafts))

    def verified(self, request: Request, num_drafts: int, num_tokens: int, num_sampled: int) -> None:
        """Correct the request's counters by the drafts of a row that were rejected.

        Args:
            num_tokens: the row's tokens, drafts included.
            num_sampled: tokens that it appends: the accepted drafts and one more.
        """
        rejected = 1 + num_drafts - num_sampled
        if num_drafts and self.rewinds:
            self._cache.settle(request.table, rewind=rejected > 0)
            rejected = num_tokens if rejected else 0
        request.num_computed -= rejected
        request.pending -= 1 + num_drafts
        request.unsure -= num_drafts


def _reads_tokens(params: SamplingParams) -> bool:
    """Return whether sampling reads the tokens before a position, or reports more than the token."""
    penalties = params.presence_penalty, params.frequency_penalty, params.repetition_penalty - 1
    reports = params.logprobs is not None or params.logprob_token_ids is not None
    return any(penalties) or bool(params.bad_token_ids) or reports
