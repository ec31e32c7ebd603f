"""What a head is trained on: prompts of a user, the model's own answers, and its hidden states.

They come from Octavo's own engines, so the head sees what it will see when it drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.features.speculation.eagle.head import HeadShape
from octavo.features.speculation.eagle.prompts import OnProgress, as_message, write_prompts
from octavo.hub.files import ModelFiles
from octavo.models.encoders.registry import is_encoder
from octavo.models.load import open_checkpoint
from octavo.models.load.arranged import arranged
from octavo.models.registry import spec_of
from octavo.nn.weights import TensorSpec
from octavo.text.prompts.prompt import TokensPrompt

if TYPE_CHECKING:
    from octavo import LLM

_EMBEDDINGS, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt with its answer.

    Attributes:
        tokens: [n] int64.
        states: [n, hidden_size], the model's hidden states after its final norm; in bfloat16 if collected, since a
            head is trained with far more noise than this rounds.
        num_prompt: tokens of the prompt.
    """

    tokens: Tensor
    states: Tensor
    num_prompt: int

    @property
    def num_answer(self) -> int:
        return len(self.tokens) - self.num_prompt

    def on(self, device: torch.device) -> Example:
        """Return it on a device, with states in float32."""
        return Example(self.tokens.to(device), self.states.to(device).float(), self.num_prompt)


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


def collect(
    model: str,
    prompts: Sequence[Any],
    *,
    max_tokens: int,
    context: int,
    progress: OnProgress,
    written: int = 0,
    seed: int = 0,
    at_once: int = 128,
    **settings: Any,
) -> list[Example]:
    """Let the model answer prompts greedily; return them with the hidden states of all tokens.

    Args:
        prompts: texts, completed as they are, or lists of messages.
        max_tokens: most tokens of an answer.
        context: most tokens of a prompt and its answer.
        written: further prompts that the model writes itself.
        seed: of those.
        settings: keywords of `LLM` for both engines: one that answers, and one that reads.

    Raises:
        ConfigError: a prompt can't be answered, for example because it is longer than the context; or the model can't
            write prompts.
    """
    from octavo import LLM

    with closing(LLM(model, max_model_len=context, **settings)) as llm:
        prompts = list(prompts)
        if written:
            texts = write_prompts(llm, written, context=context, seed=seed, progress=progress)
            prompts += map(as_message, texts)
        answers = _answers(llm, prompts, max_tokens)
        progress("answers", len(prompts), len(prompts))
    with closing(LLM(model, runner="pooling", max_model_len=context, **settings)) as llm:
        return _examples(llm, answers, progress, at_once)


def _answers(llm: LLM, prompts: Sequence[Any], max_tokens: int) -> list[tuple[list[int], list[int]]]:
    """Return the tokens of each prompt and answer. All prompts are checked before the first is answered."""
    from octavo import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    for number, one in enumerate(prompts, 1):
        try:
            (llm.enqueue if isinstance(one, str) else llm.enqueue_chat)(one, params)
        except InvalidRequestError as error:
            raise ConfigError(f"Prompt {number} of {len(prompts)} can't be answered: {error}") from error
    outputs = llm.wait_for_completion()
    return [(list(one.prompt_token_ids or ()), list(one.outputs[0].token_ids)) for one in outputs]


def _examples(
    llm: LLM, answers: Sequence[tuple[list[int], list[int]]], progress: OnProgress, at_once: int
) -> list[Example]:
    made = []
    for start in range(0, len(answers), at_once):
        chunk = answers[start : start + at_once]
        whole = [TokensPrompt(prompt_token_ids=prompt + answer) for prompt, answer in chunk]
        read = llm.encode(whole, normalize=False, use_tqdm=False, convert_to_numpy=True)
        for (prompt, answer), one in zip(chunk, read, strict=True):
            states = torch.tensor(one.outputs.data, dtype=torch.bfloat16)
            made.append(Example(torch.tensor(prompt + answer), states, len(prompt)))
        progress("hidden states", min(start + at_once, len(answers)), len(answers))
    return made
