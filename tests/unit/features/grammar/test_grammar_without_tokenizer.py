"""What needs text is refused by an engine without a tokenizer."""

from __future__ import annotations

import pytest

from octavo.core.errors import InvalidRequestError
from octavo.core.params import SamplingParams
from octavo.core.structured import StructuredOutputsParams
from octavo.engine.fake import fake_info
from octavo.text.prompts.prepare import Preparer
from octavo.text.tokenizers.no_tokenizer import NoTokenizer


def test_it_needs_a_tokenizer() -> None:
    preparer = Preparer(NoTokenizer(50), fake_info(vocab_size=50, features=["grammar"]))
    with pytest.raises(InvalidRequestError, match=r"runs without a tokenizer.*structured_outputs"):
        preparer.prepare([4, 5], SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")))
