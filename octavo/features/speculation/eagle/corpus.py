"""What a head is trained on: prompts of a user, the model's own answers, and its hidden states.

They come from Octavo's own engines, so the head sees what it will see when it drafts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.features.speculation.eagle.head import HeadShape
from octavo.hub.files import ModelFiles
from octavo.models.encoders.registry import is_encoder
from octavo.models.load import open_checkpoint
from octavo.models.load.arranged import arranged
from octavo.models.registry import spec_of
from octavo.nn.weights import TensorSpec
from octavo.text.prompts.prompt import TokensPrompt

_EMBEDDINGS, _HEAD = "model.embed_tokens.weight", "lm_head.weight"

OnProgress = Callable[[str, int, int], None]
"""Called with a phase, and how much of it is done, of how much."""


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt with its answer.

    Attributes:
        tokens: [n] int64.
        states: [n, hidden_size] float32, the model's hidden states after its final norm.
        num_prompt: tokens of the prompt.
    """

    tokens: Tensor
    states: Tensor
    num_prompt: int

    @property
    def num_answer(self) -> int:
        return len(self.tokens) - self.num_prompt

    def to(self, device: str) -> Example:
        return Example(self.tokens.to(device), self.states.to(device), self.num_prompt)


@dataclass(frozen=True, slots=True)
class Target:
    """The parts of a model that its head needs.

    Attributes:
        embeddings: [vocab_size, hidden_size] float32.
        output: [vocab_size, hidden_size] float32, its output head; the same tensor if they are tied.
    """

    shape: HeadShape
    embeddings: Tensor
    output: Tensor

    def to(self, device: str) -> Target:
        embeddings = self.embeddings.to(device)
        return Target(self.shape, embeddings, embeddings if self.output is self.embeddings else self.output.to(device))


def target_of(files: ModelFiles) -> Target:
    """Read the tables of a model's tokens.

    Raises:
        ConfigError: the model has parts that the layout of heads can't represent.
        ModelFileError: the checkpoint can't be read.
    """
    if is_encoder(files.config):
        raise ConfigError(
            f"{files.name} makes embeddings; heads draft for models that generate text. Train for another."
        )
    spec = spec_of(files.config)
    odd = [
        name
        for name, present in {
            "a cap of its logits": spec.logit_cap is not None,
            "positions that are not rotary": spec.alibi or spec.learned_positions or not spec.rope.rotary_dim,
            "a scaled output": type(spec.multipliers)() != spec.multipliers,
            "a bias of its output": "head" in spec.biases,
            "no rotation of whole heads": spec.rope.width != spec.head_dim,
        }.items()
        if present
    ]
    checkpoint = arranged(open_checkpoint(files), spec)
    if odd or not checkpoint.has(_EMBEDDINGS):
        what = odd[0] if odd else f"no tensor {_EMBEDDINGS}"
        raise ConfigError(
            f"{files.name} has {what}, for which no layout of heads is published. Use a Llama-like model."
        )
    stored = TensorSpec((spec.vocab_size, spec.hidden_size), torch.float32)
    embeddings = checkpoint.tensor(_EMBEDDINGS, stored).float()
    output = embeddings if spec.tied else checkpoint.tensor(_HEAD, stored).float()
    shape = HeadShape(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab_size,
        max_position_embeddings=spec.rope.max_position,
        rms_norm_eps=spec.norm.eps,
        rope_theta=spec.rope.theta,
    )
    return Target(shape, embeddings, output)


def read_prompts(path: Path) -> list[Any]:
    """Return the prompts of a file: one a line, as JSON with `messages` or `prompt`, or as plain text.

    Raises:
        ConfigError: the file can't be read, or has fewer than two prompts.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # other line ends may be in the strings of JSON
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--data {path}: {error}. Give a file in UTF-8 with a prompt on each line.") from error
    prompts = [_prompt(line.strip(), number, path) for number, line in enumerate(lines, 1) if line.strip()]
    if len(prompts) < 2:
        raise ConfigError(
            f"--data {path} has {len(prompts)} prompts; at least 2 are needed, one to train and one to test."
        )
    return prompts


def _prompt(line: str, number: int, path: Path) -> Any:
    if not line.startswith("{"):
        return [{"role": "user", "content": line}]
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--data {path}, line {number} is not valid JSON: {error}.") from error
    for key, kind in (("messages", list), ("prompt", str)):
        if isinstance(found.get(key), kind) and found[key]:
            return found[key]
    raise ConfigError(
        f"--data {path}, line {number} has neither messages (a list) nor prompt (a text), or it is empty."
    )


def collect(
    model: str,
    prompts: Sequence[Any],
    *,
    max_tokens: int,
    context: int,
    progress: OnProgress,
    at_once: int = 16,
    **settings: Any,
) -> list[Example]:
    """Let the model answer prompts greedily; return them with the hidden states of all tokens.

    Args:
        prompts: texts, completed as they are, or lists of messages.
        max_tokens: most tokens of an answer.
        context: most tokens of a prompt and its answer.
        settings: keywords of `LLM` for both engines: one that answers, and one that reads.

    Raises:
        ConfigError: a prompt can't be answered, for example because it is longer than the context.
    """
    answers = _answers(model, prompts, max_tokens, context, progress, settings)
    return _examples(model, answers, context, progress, at_once, settings)


def _answers(
    model: str,
    prompts: Sequence[Any],
    max_tokens: int,
    context: int,
    progress: OnProgress,
    settings: dict[str, Any],
) -> list[tuple[list[int], list[int]]]:
    """Return the tokens of each prompt and answer. All prompts are checked before the first is answered."""
    from octavo import LLM, SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    llm = LLM(model, max_model_len=context, **settings)
    try:
        for number, one in enumerate(prompts, 1):
            try:
                (llm.enqueue if isinstance(one, str) else llm.enqueue_chat)(one, params)
            except InvalidRequestError as error:
                raise ConfigError(f"Prompt {number} of {len(prompts)} can't be answered: {error}") from error
        outputs = llm.wait_for_completion()
        progress("answers", len(prompts), len(prompts))
        return [(list(one.prompt_token_ids or ()), list(one.outputs[0].token_ids)) for one in outputs]
    finally:
        llm.close()


def _examples(
    model: str,
    answers: Sequence[tuple[list[int], list[int]]],
    context: int,
    progress: OnProgress,
    at_once: int,
    settings: dict[str, Any],
) -> list[Example]:
    from octavo import LLM

    made = []
    llm = LLM(model, runner="pooling", max_model_len=context, **settings)
    try:
        for start in range(0, len(answers), at_once):
            chunk = answers[start : start + at_once]
            whole = [TokensPrompt(prompt_token_ids=prompt + answer) for prompt, answer in chunk]
            read = llm.encode(whole, normalize=False, use_tqdm=False)
            for (prompt, answer), one in zip(chunk, read, strict=True):
                states = torch.tensor(one.outputs.data, dtype=torch.float32)
                made.append(Example(torch.tensor(prompt + answer), states, len(prompt)))
            progress("hidden states", min(start + at_once, len(answers)), len(answers))
    finally:
        llm.close()
    return made
