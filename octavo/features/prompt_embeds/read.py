"""Read and check prompts with embeddings, and lay them out among the prompt's tokens."""

from __future__ import annotations

import base64
import binascii
import ctypes
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, cast

import numpy as np

from octavo.core.errors import InvalidRequestError, UnsupportedError, context_error
from octavo.core.info import ModelInfo
from octavo.core.params import SamplingParams
from octavo.core.request import PLACEHOLDER
from octavo.features.prompt_embeds.payload import NAME
from octavo.features.prompt_embeds.span import FLOAT_BYTES, EmbedSpan, FloatType
from octavo.features.prompt_embeds.torch_file import NotATensorError, read_tensor
from octavo.text.hooks import ReadPrompt, encoded
from octavo.text.prompts.message_parts import Mixture
from octavo.text.prompts.prompt import Prompt
from octavo.text.tokenizers.tokenizer import Tokenizer

PARAM = "prompt_embeds"
_EXPONENTS: dict[FloatType, int] = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}
"""Exponent bits: all set in infinities and NaN only."""


@dataclass(frozen=True, slots=True)
class Embeds:
    """Consecutive embeddings: `data` is [count, size] of `dtype`, little-endian; `param` is their field, for errors."""

    dtype: FloatType
    count: int
    size: int
    data: bytes
    param: str

    def part(self, begin: int, end: int) -> Embeds:
        """Return the embeddings [begin, end)."""
        row = self.size * FLOAT_BYTES[self.dtype]
        return replace(self, count=end - begin, data=self.data[begin * row : end * row])


def read_embeds(given: Any, param: str = PARAM) -> Embeds:
    """Read a `torch.save` file in base64, or a torch tensor on any device.

    Raises:
        InvalidRequestError: neither, or not dense, of another dtype than float32, float16 and bfloat16, or misshapen.
    """
    if given is None or (isinstance(given, str) and not given):
        raise InvalidRequestError(
            f"{param} requires a non-empty tensor, saved by torch.save, in base64.", param=param, value=given
        )
    return _of_base64(given, param) if isinstance(given, str) else _of_tensor(given, param)


def _of_base64(text: str, param: str) -> Embeds:
    try:
        file = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise InvalidRequestError(
            f"{param} is not valid base64: {exc}. Encode the bytes that torch.save writes.", param=param, value=text
        ) from None
    try:
        saved = read_tensor(file)
    except NotATensorError as exc:
        raise InvalidRequestError(f"{param} {exc}.", param=param) from None
    return _embeds(saved.dtype, saved.shape, saved.data, param)


def _of_tensor(tensor: Any, param: str) -> Embeds:
    dtype = str(getattr(tensor, "dtype", "")).removeprefix("torch.")
    if not hasattr(tensor, "data_ptr") or dtype not in FLOAT_BYTES or str(tensor.layout) != "torch.strided":
        raise InvalidRequestError(
            f"{param} must be a dense torch tensor of float32, float16 or bfloat16, got "
            f"{f'{tensor.layout} of {dtype}' if hasattr(tensor, 'layout') else type(tensor).__name__}.",
            param=param,
        )
    here = tensor.detach().cpu().contiguous()
    data = ctypes.string_at(here.data_ptr(), here.numel() * here.element_size()) if here.numel() else b""
    return _embeds(dtype, tuple(here.shape), data, param)


def _embeds(dtype: FloatType, shape: tuple[int, ...], data: bytes, param: str) -> Embeds:
    rows = shape[1:] if len(shape) == 3 and shape[0] == 1 else shape
    if len(rows) != 2 or 0 in rows:
        raise InvalidRequestError(
            f"{param} must have the shape [tokens, hidden size], got {list(shape)}.", param=param, value=list(shape)
        )
    return Embeds(dtype, rows[0], rows[1], data, param)


def lay_out(
    prompt: Mapping[str, Any], tokenizer: Tokenizer, info: ModelInfo, params: SamplingParams, *, truncated: bool
) -> ReadPrompt:
    """Convert a prompt with embeddings to token ids with placeholders.

    Raises:
        InvalidRequestError: the prompt can't be served; the message names the field, the value and the remedy.
    """
    _check_asked(info, params, truncated=truncated)
    given = prompt[PARAM]
    tokens, embeds = _of_pieces(given, tokenizer) if isinstance(given, Mixture) else _placed(prompt)
    _check(embeds, info)
    rest = {name: value for name, value in prompt.items() if name not in (PARAM, "prompt_is_token_ids")}
    keys: list[int | bytes] = list(tokens)
    spans: list[EmbedSpan] = []
    at = 0
    for one in embeds:
        start = tokens.index(PLACEHOLDER, at)
        at = start + one.count
        keys[start:at] = _digests(one)
        spans.append(EmbedSpan(start, one.count, one.dtype, memoryview(one.data)))
    plain = cast("Prompt", rest | {"prompt_token_ids": tokens})
    return ReadPrompt(plain, keys, encoded(spans, PARAM))


def _check_asked(info: ModelInfo, params: SamplingParams, *, truncated: bool) -> None:
    """Raise InvalidRequestError for options that prompts with embeddings don't support."""
    if NAME not in info.features:
        raise UnsupportedError(
            "You must set `--enable-prompt-embeds` (enable_prompt_embeds=True) to input `prompt_embeds`.", param=PARAM
        )
    if params.prompt_logprobs is not None:
        raise UnsupportedError(
            "prompt_logprobs is not compatible with prompt embeds, which are no tokens; leave one of them out.",
            param="prompt_logprobs",
            value=params.prompt_logprobs,
        )
    if truncated:
        raise UnsupportedError(
            "truncate_prompt_tokens can't be combined with prompt_embeds; cut the tensor instead.",
            param="truncate_prompt_tokens",
        )


def _check(embeds: Sequence[Embeds], info: ModelInfo) -> None:
    """Raise InvalidRequestError for embeddings of another size than the model's, or not finite."""
    count = sum(one.count for one in embeds)
    if count >= info.max_model_len:
        raise InvalidRequestError(context_error(info.max_model_len, count, field="prompt"), param=embeds[0].param)
    for one in embeds:
        if one.size != info.hidden_size:
            raise InvalidRequestError(
                f"{one.param} must be as wide as the model's hidden size: [tokens, {info.hidden_size}], got "
                f"[{one.count}, {one.size}].",
                param=one.param,
                value=[one.count, one.size],
            )
        bits, exponent = _bits(one), _EXPONENTS[one.dtype]
        broken = np.flatnonzero(((bits & exponent) == exponent).any(1))
        if len(broken):
            raise InvalidRequestError(
                f"{one.param} must hold numbers alone, but in row {broken[0]} there is NaN or an infinity. Compute it "
                "anew.",
                param=one.param,
            )


def _bits(embeds: Embeds) -> np.ndarray:
    """Return the bits as [count, size] unsigned integers."""
    kind = np.dtype(f"<u{FLOAT_BYTES[embeds.dtype]}")
    return np.frombuffer(embeds.data, dtype=kind).reshape(embeds.count, embeds.size)


def _placed(prompt: Mapping[str, Any]) -> tuple[list[int], list[Embeds]]:
    """Return a prompt's token ids with placeholders, and its embeddings in their order; see `EmbedsPrompt`.

    Raises:
        InvalidRequestError: the parts differ in length.
    """
    embeds = read_embeds(prompt[PARAM])
    tokens, mask = prompt.get("prompt_token_ids"), prompt.get("prompt_is_token_ids")
    if tokens is None and mask is None:
        return [PLACEHOLDER] * embeds.count, [embeds]
    if isinstance(tokens, list) and isinstance(mask, list) and len(tokens) == len(mask) == embeds.count:
        whole = [token if is_token else PLACEHOLDER for token, is_token in zip(tokens, mask, strict=True)]
        if whole.count(PLACEHOLDER) == sum(not is_token for is_token in mask):
            runs = [[*run] for given, run in groupby(range(len(mask)), lambda at: not mask[at]) if given]
            return whole, [embeds.part(run[0], run[-1] + 1) for run in runs]
    raise InvalidRequestError(
        f"prompt_token_ids and prompt_is_token_ids must both be lists as long as {PARAM}, which has {embeds.count} "
        "rows, with a token's id wherever the latter is true. Give both, or leave both out.",
        param="prompt_is_token_ids",
    )


def _of_pieces(mixture: Mixture, tokenizer: Tokenizer) -> tuple[list[int], list[Embeds]]:
    """Likewise for a prompt in pieces. Each text is tokenized alone, as between special tokens."""
    tokens: list[int] = []
    embeds: list[Embeds] = []
    for place, piece in enumerate(mixture.pieces):
        if isinstance(piece, str):
            tokens += tokenizer.encode_after(piece) if place else tokenizer.encode(piece, add_special_tokens=False)
        else:
            embeds.append(read_embeds(piece.data, piece.param))
            tokens += [PLACEHOLDER] * embeds[-1].count
    return tokens, embeds


def _digests(embeds: Embeds) -> list[bytes]:
    """Return a digest for each row; equal rows of equal dtype have equal digests."""
    size = embeds.size * FLOAT_BYTES[embeds.dtype]
    rows, kind = memoryview(embeds.data), embeds.dtype.encode()
    return [
        hashlib.blake2b(rows[at : at + size], digest_size=32, person=kind).digest() for at in range(0, len(rows), size)
    ]
