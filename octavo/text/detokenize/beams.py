"""From a finished request with beams to what `LLM.beam_search` gives."""

from __future__ import annotations

from octavo.core.beams import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from octavo.core.output import FinishReason, RequestOutput
from octavo.text.tokenizers.tokenizer import Tokenizer


def beams_of(output: RequestOutput, params: BeamSearchParams, tokenizer: Tokenizer) -> BeamSearchOutput:
    """The choices as sequences: prompt and output together, as tokens and as text."""
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
