"""The workloads must never change: figures taken on different days and engines are compared by them."""

from __future__ import annotations

import hashlib
import json

import pytest

from octavo.bench.workloads import WORKLOADS, workload


@pytest.mark.parametrize(
    ("name", "requests", "tokens_in", "tokens_out", "digest"),
    [
        ("chat", 1000, 213850, 215479, "c21e317b5d094f93"),
        ("decode", 256, 32768, 131072, "0e4014070f5ca39e"),
        ("single", 1, 128, 256, "ab41eff404f4ba51"),
        ("prefill", 64, 131072, 64, "a7f51b51276b70e0"),
        ("long", 32, 262144, 8192, "7c11fef6bbf7e025"),
        ("shared", 256, 278528, 16384, "866e6c14f8f1d629"),
    ],
)
def test_the_full_workloads_are_fixed(name: str, requests: int, tokens_in: int, tokens_out: int, digest: str) -> None:
    works = workload(name, seed=3, vocab_size=49152)
    assert len(works) == requests
    assert sum(len(w.prompt) for w in works) == tokens_in
    assert sum(w.output_tokens for w in works) == tokens_out
    assert hashlib.sha256(json.dumps(works).encode()).hexdigest()[:16] == digest


def test_another_seed_means_the_same_lengths_and_other_tokens() -> None:
    one, two = workload("chat", seed=1, scale=0.05), workload("chat", seed=2, scale=0.05)
    assert [(len(w.prompt), w.output_tokens) for w in one] == [(len(w.prompt), w.output_tokens) for w in two]
    assert not {tuple(w.prompt[:4]) for w in one} & {tuple(w.prompt[:4]) for w in two}


def test_scale_changes_how_many_not_how_long() -> None:
    few, all_ = workload("shared", scale=0.1), workload("shared")
    assert len(few) == 26
    assert {len(w.prompt) for w in few} == {len(w.prompt) for w in all_} == {1088}
    assert len(workload("single", scale=10)) == 1
    assert len(workload("chat", scale=1e-9)) == 1


def test_shared_prompts_share_exactly_their_head() -> None:
    first, second = workload("shared", scale=0.01)[:2]
    assert first.prompt[:1024] == second.prompt[:1024]
    assert first.prompt[1024:] != second.prompt[1024:]


def test_special_tokens_are_never_used() -> None:
    for name in WORKLOADS:
        for work in workload(name, vocab_size=3000, scale=0.02):
            assert min(work.prompt) >= 1000
            assert max(work.prompt) < 2000


def test_mistakes_are_refused() -> None:
    with pytest.raises(KeyError):
        workload("nonsense")
    with pytest.raises(ValueError, match="too small"):
        workload("chat", vocab_size=2000)
