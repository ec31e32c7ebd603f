"""Verification of drafts: a draft is accepted if it is the token the sampler draws from the target model anyway.

The target's token is drawn at every position, after each number of drafts, by the request's own parameters and random
numbers; a draft is accepted if it is that token. The output is therefore the same as without drafts, for any drafter:
exactly the target's distribution, and for a seeded request the same tokens.

For a deterministic proposal this is the rejection sampling of Leviathan, Kalman and Matias 2023
(https://arxiv.org/abs/2211.17192): draft d is accepted with probability p(d), and otherwise the emitted token follows
p without d, renormalized, which is their residual distribution. A drafter that samples from a distribution of its own,
at total variation D from the target's, need not report it: drawn with the target's random numbers by Gumbel noise, its
drafts are accepted with a probability of at least (1 - D) / (1 + D), where their rule has 1 - D (Daliri, Musco and
Suresh 2024, https://arxiv.org/abs/2408.07978, who call this drafter-invariant).
"""

from __future__ import annotations

import torch
from torch import Tensor


def verify(drawn: Tensor, drafts: Tensor, counts: Tensor, starts: Tensor) -> Tensor:
    """Return how many drawn tokens each of R rows keeps, [R] int64: its accepted drafts and one more.

    Nothing is read back from the device.

    Args:
        drawn: [S] integers, the target's tokens: row r's from `starts[r]` on, first the one after no draft, then the
            one after its first draft, and so on. -1 if none could be drawn.
        drafts: [R, K] integers, at least 0; values beyond a row's count are ignored.
        counts: [R] integers, how many drafts each row has, at most K and one less than it has drawn tokens.
        starts: [R] int64.
    """
    order = torch.arange(drafts.shape[1], device=drafts.device)
    places = (starts[:, None] + order).clamp_(max=len(drawn) - 1)
    agrees = (drawn[places] == drafts) & (order < counts[:, None])
    return 1 + agrees.long().cumprod(1).sum(1)


def verify_branches(
    drawn: Tensor, drafts: Tensor, counts: Tensor, starts: Tensor, parents: Tensor, depths: Tensor, precedes: Tensor
) -> tuple[Tensor, Tensor]:
    """Verify drafts that may branch (SpecInfer, https://arxiv.org/abs/2305.09781): one is accepted if it is the token
    drawn after the one before it, and that one is accepted. Of equal drafts after the same token, one is kept.

    Nothing is read back from the device.

    Args:
        drawn: as for `verify`, but of each row the token drawn after no draft, then the one after each draft.
        drafts, counts, starts: as for `verify`.
        parents, depths: [N] int64, N >= K, of `DraftTree`.
        precedes: [N, N] float32, of `DraftTree`.

    Returns:
        How many drawn tokens each row keeps, [R] int64; and their places among the row's, in order, [R, 1 + K] int64.
    """
    count = drafts.shape[1]
    order = torch.arange(1, 1 + count, device=drafts.device)
    places = (starts[:, None] + 1 + parents[:count]).clamp_(max=len(drawn) - 1)
    agrees = (drawn[places] == drafts) & (order <= counts[:, None])
    accepted = (~agrees).float() @ precedes[:count, :count].T == 0
    paths = starts.new_zeros(len(starts), 1 + count)
    paths.scatter_reduce_(1, depths[:count].expand(len(starts), count), torch.where(accepted, order, 0), "amax")
    return 1 + (paths > 0).sum(1), paths
