"""Arguments and results of `LLM.beam_search`."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from octavo.core.keywords import Suggesting
from octavo.core.output import FinishReason, RequestOutput
from octavo.core.params import OutputKind, SamplingParams
from octavo.core.structured import StructuredOutputsParams
from octavo.text.tokenizers.tokenizer import Tokenizer


class BeamSearchParams(msgspec.Struct, metaclass=Suggesting, omit_defaults=True):
    """Parameters of a search.

    Attributes:
        beam_width: sequences to follow and to return.
        max_tokens: the most tokens to generate.
        ignore_eos: continue past the model's end-of-sequence tokens.
        temperature: in [0, 2]; no effect, since sequences are ranked by log-probabilities of the raw logits.
        length_penalty: in [-32, 32]; sequences are ranked by log-probability / length ** length_penalty.
        include_stop_str_in_output: keep the token that ended a sequence.
        structured_outputs: refused, since beam search does not support it.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None

    def sampling(self) -> SamplingParams:
        """Return the sampling parameters of the whole search.

        Raises:
            InvalidRequestError: a field is out of range; the message names it.
        """
        return SamplingParams(
            n=self.beam_width,
            beam_width=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            length_penalty=self.length_penalty,
            include_stop_str_in_output=self.include_stop_str_in_output,
            structured_outputs=self.structured_outputs,
            output_kind=OutputKind.FINAL_ONLY,
        )

    def output(self, found: RequestOutput, tokenizer: Tokenizer) -> BeamSearchOutput:
        """Return the result of a search: its choices as sequences of tokens and text."""
        return _beams_of(found, self, tokenizer)


@dataclass(slots=True)
class BeamSearchSequence:
    """A continuation found by the search.

    Attributes:
        tokens: prompt and generated tokens.
        cum_logprob: sum of the generated tokens' log-probabilities, including the token that ended it.
        text: all of `tokens` as text.
    """

    tokens: list[int]
    cum_logprob: float
    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """A prompt's `beam_width` best continuations, the best first."""

    sequences: list[BeamSearchSequence]


def _beams_of(output: RequestOutput, params: BeamSearchParams, tokenizer: Tokenizer) -> BeamSearchOutput:
    """Return the choices as sequences: prompt and output together, as tokens and as text."""
    sequences = []
    for choice in output.outputs:
        ended = choice.finish_reason == FinishReason.STOP.value and not params.include_stop_str_in_output
        tokens = output.prompt_token_ids + (choice.token_ids[:-1] if ended else choice.token_ids)
        sequences.append(
            BeamSearchSequence(
                tokens=tokens,
                cum_logprob=choice.cumulative_logprob or 0.0,
                text=tokenizer.decode(tokens, skip_special_tokens=False) if tokenizer.present else "",
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
            )
        )
    return BeamSearchOutput(sequences)
