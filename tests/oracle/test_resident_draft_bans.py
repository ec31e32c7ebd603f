"""Rows behind drafts, of which the host only knows bounds, are sampled on a device as the CPU samples them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from octavo.core.params import SamplingParams
from octavo.sampling.parameters import NUM_PARAMS, packed_words
from octavo.sampling.resident import ParamTable
from octavo.sampling.resident_drafts import DraftRow, DraftSampler
from octavo.sampling.sampler import RowSampler
from octavo.sampling.state import PreparedParams, SampleRow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB, LENGTH, PROMPT, KNOWN, STOP = 300, 32, 6, 14, 2
AHEAD = 3
PARAMS = [
    SamplingParams(temperature=0, min_tokens=KNOWN - PROMPT + 1, max_tokens=99),
    SamplingParams(temperature=0, min_tokens=KNOWN - PROMPT + AHEAD, max_tokens=99, repetition_penalty=1.2),
    SamplingParams(temperature=0, bad_token_ids=[[5], [6, 7], [6, 8, STOP]]),
    SamplingParams(temperature=0, frequency_penalty=0.9, presence_penalty=0.4),
    SamplingParams(temperature=0, allowed_token_ids=[4, 9, 11], logit_bias={9: 1.0}),
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, bad_token_ids=[[6, 8, STOP]]),
]
PROMPTS = [PROMPT] * (len(PARAMS) - 1) + [KNOWN - 1]
"""The last one's bad word begins in its prompt, where it does not count."""


@pytest.mark.parametrize("loose", [0, 1, 4])
def test_what_depends_on_a_length_is_decided_on_the_device(loose: int) -> None:
    """`loose`: by how much the host's bounds are too low. The tokens that some rows forbid are the most likely."""
    rng = np.random.default_rng(loose)
    prepared = [PreparedParams.make(params, 0, [STOP], VOCAB) for params in PARAMS]
    tokens = rng.choice(np.array([2, 5, 6, 7, 8], dtype=np.int32), (len(PARAMS), LENGTH))
    tokens[-1, KNOWN - 2 : KNOWN] = 6, 8
    packed = np.stack([packed_words(one, prompt) for one, prompt in zip(prepared, PROMPTS, strict=True)])
    assert packed.shape[1] == NUM_PARAMS
    length = torch.full((len(PARAMS),), KNOWN, dtype=torch.int32, device=DEVICE)
    table = ParamTable(torch.from_numpy(packed).to(DEVICE), torch.from_numpy(tokens).to(DEVICE), length)
    slots, ahead = np.divmod(np.arange(len(PARAMS) * AHEAD, dtype=np.int32), np.int32(AHEAD))
    logits = torch.randn(len(slots), VOCAB)
    logits[:, [STOP, 5, 7, 8]] += torch.tensor([40.0, 30.0, 20.0, 10.0])
    rows = [SampleRow(prepared[s], tokens[s, : KNOWN + a], PROMPTS[s]) for s, a in zip(slots, ahead, strict=True)]
    expected = RowSampler().sample(logits.clone(), rows).tokens.tolist()
    bounds = [
        DraftRow(i, prepared[s], PROMPTS[s], KNOWN + int(a) - loose, loose + 1)
        for i, (s, a) in enumerate(zip(slots, ahead, strict=True))
    ]
    sampler = DraftSampler(table, VOCAB, len(slots))
    parts = (torch.from_numpy(part).to(DEVICE) for part in (slots, ahead))
    found, _ = sampler.sample_drafted(logits.to(DEVICE), *parts, bounds)
    assert found.tolist() == expected
    by_request = np.array(expected).reshape(-1, AHEAD)
    assert by_request[0].tolist() == [5, STOP, STOP], "the ban ends behind the first draft"
    assert STOP not in by_request[1]
    assert by_request[5].tolist() == [STOP] * AHEAD
    assert by_request[6, 0] == STOP
