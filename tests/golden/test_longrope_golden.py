"""LongRoPE against Transformers around the length in training: which factors sequences get, prompts and new tokens.

The longest sequence that a server allows decides for all, as in the code published with MiniCPM 3. Transformers decides
by each sequence; for shorter ones, a model whose factors are all long is the reference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_families_golden import TOLERANCE, expected_logits, runner_with
from tiny import load_model, make_checkpoint, model_files, reference_of

from octavo.models.decoder import CausalLM

TRAINED, LONGER = 32, 40
PROMPT, CHUNK = 21, 8
FAMILIES = ("phi3-longrope", "minicpm3")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, make_checkpoint(request.param, folder)


def only_factors(theirs: Any, name: str) -> Any:
    """The same model with one of the two sets of factors for sequences of all lengths."""
    rope = dict(theirs.config.rope_parameters)
    config = type(theirs.config).from_dict(
        {**theirs.config.to_dict(), "rope_parameters": {**rope, "long_factor": rope[name], "short_factor": rope[name]}}
    )
    config._attn_implementation = "eager"
    model = type(theirs)(config).eval()
    model.load_state_dict(theirs.state_dict())
    return model


def logits_of(model: CausalLM, name: str, length: int) -> tuple[list[int], torch.Tensor]:
    """Logits of a prompt in chunks, and of greedy tokens behind it up to this length."""
    runner = runner_with(model, name, seed=6)
    prompt = torch.randint(1, 199, (PROMPT,), generator=torch.Generator().manual_seed(5)).tolist()
    row, parts = runner.row(prompt, length), []
    while row.computed < length:
        parts.append(runner.step([row], [min(CHUNK, len(row.tokens) - row.computed)], all_logits=True))
        if row.computed == len(row.tokens):
            row.tokens.append(int(parts[-1][-1].argmax()))
    return row.tokens[:length], torch.cat(parts)


def computed(path: Path, name: str, limit: int) -> tuple[list[int], torch.Tensor]:
    """Return a sequence as long as the server's limit, and its logits."""
    files = model_files(path)
    return logits_of(load_model(files, reference_of(files), max_length=limit), name, limit)


@pytest.mark.parametrize("name", ["torch", "native"])
def test_sequences_as_long_as_in_training_have_the_short_factors(folder: tuple[Path, Any], name: str) -> None:
    """If the server's limit allows no longer ones; Transformers does the same of its own accord."""
    path, theirs = folder
    tokens, logits = computed(path, name, TRAINED)
    torch.testing.assert_close(logits, expected_logits(theirs, tokens), **TOLERANCE)


@pytest.mark.parametrize("name", ["torch", "native"])
def test_all_sequences_of_a_longer_limit_have_the_long_factors(folder: tuple[Path, Any], name: str) -> None:
    """From the first token on, so that nothing changes where a sequence outgrows the length in training."""
    path, theirs = folder
    tokens, logits = computed(path, name, LONGER)
    torch.testing.assert_close(logits, expected_logits(theirs, tokens), **TOLERANCE)
    short = tokens[:PROMPT]
    torch.testing.assert_close(
        logits[:PROMPT], expected_logits(only_factors(theirs, "long_factor"), short), **TOLERANCE
    )
    assert (logits[:PROMPT] - expected_logits(theirs, short)).abs().max() > 0.05
