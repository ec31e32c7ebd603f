"""Read the images or audio of a prompt, and lay out their placeholders among its tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, cast

from octavo.core.errors import InvalidRequestError, UnsupportedError, context_error
from octavo.core.info import ModelInfo
from octavo.core.params import SamplingParams
from octavo.core.request import PLACEHOLDER
from octavo.features.media.kinds import PLURALS, make_processor
from octavo.features.media.parts import opener
from octavo.features.media.payload import MediaInfo, MediaItem
from octavo.features.media.processors.base import Item, Run, TooOddError
from octavo.text.hooks import ReadPrompt, encoded
from octavo.text.prompts.message_parts import GivenPart, Mixture
from octavo.text.prompts.prompt import Prompt
from octavo.text.tokenizers.literal import framed
from octavo.text.tokenizers.tokenizer import Tokenizer

_PARAM = "multi_modal_data"
_KEYS = {"prompt", "prompt_token_ids", "cache_salt", "type", _PARAM}


class Reader:
    """Reads the prompts of one model. Stateless; may be used from any thread.

    Raises:
        ConfigError, ModelFileError: see `make_processor`.
    """

    def __init__(self, tokenizer: Tokenizer, info: ModelInfo, own: MediaInfo) -> None:
        self._tokenizer, self._info, self._own = tokenizer, info, own
        self._processor = make_processor(own.config, own.processor, lambda: tokenizer)
        self._opener = opener(own)
        self._modality, self._some = own.modality, PLURALS[own.modality]

    def read(self, prompt: Mapping[str, Any], params: SamplingParams, *, truncated: bool) -> ReadPrompt:
        """Read a prompt with `multi_modal_data`: a mixture of texts and parts, or an object with images or audio.

        Raises:
            InvalidRequestError: it can't be served; the message names the part.
        """
        if truncated:
            raise UnsupportedError(
                f"truncate_prompt_tokens can't be combined with {self._some}; shorten the text instead.",
                param="truncate_prompt_tokens",
            )
        if params.prompt_logprobs is not None:
            raise UnsupportedError(
                f"prompt_logprobs can't be combined with {self._some}; leave one of them out.",
                param="prompt_logprobs",
                value=params.prompt_logprobs,
            )
        given = prompt[_PARAM]
        if isinstance(given, Mixture):
            tokens, media = self._of_mixture(given)
        else:
            tokens, media = self._of_object(prompt, given)
        self._check_count(len(media), media[0].param if media else _PARAM)
        return self._laid_out(prompt, tokens, media)

    # Where they are

    def _of_mixture(self, mixture: Mixture) -> tuple[list[int], list[GivenPart]]:
        """Return the tokens, with the token for each image or piece of audio, which are in their order.

        A part in a place of its own gets the tokens that a template would write around it.
        """
        token, (before, after) = self._processor.token, self._processor.around
        shown = list(mixture.shown)
        tokens: list[int] = []
        media: list[GivenPart] = []
        for place, piece in enumerate(mixture.pieces):
            if not isinstance(piece, str):
                tokens += [*before, token, *after]
                media.append(piece)
                continue
            piece = self._framed(piece)
            found = (
                self._tokenizer.encode_after(piece)
                if place
                else self._tokenizer.encode(piece, add_special_tokens=False)
            )
            tokens += found
            places = found.count(token)
            if places > len(shown):
                raise InvalidRequestError(
                    f"The prompt has {places} places of {self._some}, more than it has {self._some}. Leave "
                    f"{self._tokenizer.token_text(token)!r} out of the messages.",
                    param="messages",
                )
            media += shown[:places]
            del shown[:places]
        if shown:
            raise InvalidRequestError(
                f"The chat template leaves {shown[0].param} out of the prompt. Put it into another message.",
                param=shown[0].param,
            )
        return tokens, media

    def _of_object(self, prompt: Mapping[str, Any], given: Any) -> tuple[list[int], list[GivenPart]]:
        odd = next((name for name, value in prompt.items() if name not in _KEYS and value not in (None, {})), None)
        if odd is not None:
            raise UnsupportedError(
                f"A prompt with {_PARAM} has 'prompt' or 'prompt_token_ids', and perhaps 'cache_salt'; {odd!r} is not "
                "supported, leave it out.",
                param=odd,
            )
        if not isinstance(given, Mapping):
            raise InvalidRequestError(
                f'{_PARAM} must be an object such as {{"{self._modality}": ...}}, got {type(given).__name__}.',
                param=_PARAM,
            )
        own = self._modality
        odd = next((name for name, value in given.items() if name != own and not _is_empty(value)), None)
        if odd is not None:
            raise UnsupportedError(
                f"{_PARAM} has {odd!r}; this model reads {self._some} only. Leave it out.", param=f"{_PARAM}.{odd}"
            )
        found = given.get(own)
        parts = [
            GivenPart(f"{_PARAM}.{own}.{number}", own, one, {"type": own, own: one})
            for number, one in enumerate([] if found is None else self._opener.listed(found))
        ]
        tokens, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
        given_ids = tokens is not None
        if tokens is None:
            if not isinstance(text, str):
                raise InvalidRequestError("A prompt must have 'prompt' or 'prompt_token_ids'.", param="prompt")
            tokens = self._tokenizer.encode(self._framed(text))
        elif not isinstance(tokens, list):
            raise InvalidRequestError("prompt_token_ids must be a list of integers.", param="prompt_token_ids")
        if (places := tokens.count(self._processor.token)) != len(parts):
            name = self._tokenizer.token_text(self._processor.token)
            raise InvalidRequestError(
                f"The prompt has {places} places of {self._some} ({name!r}), and {_PARAM} has {len(parts)}. Write "
                f"{name!r} where each belongs.",
                param=_PARAM,
                value=len(parts),
            )
        if given_ids and any(self._processor.frame):
            before, after = self._processor.around
            place = self._processor.token
            tokens = [one for token in tokens for one in ([*before, place, *after] if token == place else [token])]
        return tokens, parts

    def _framed(self, text: str) -> str:
        before, after = self._processor.frame
        if not before and not after:
            return text
        return framed(text, self._tokenizer.token_text(self._processor.token), before, after)

    def _check_count(self, count: int, param: str) -> None:
        if count > self._own.limit:
            raise InvalidRequestError(
                f"At most {self._own.limit} {self._modality}(s) may be provided in one prompt (--limit-mm-per-prompt), "
                f"got {count}.",
                param=param,
                value=count,
            )

    # What they are

    def _laid_out(self, prompt: Mapping[str, Any], tokens: Sequence[int], media: Sequence[GivenPart]) -> ReadPrompt:
        """Return the prompt with each token of an image, or of audio, replaced by what it is."""
        whole: list[int] = []
        keys: list[int | bytes] = []
        items: dict[int, tuple[Item, bytes, list[tuple[int, int, int]]]] = {}
        parts = iter(media)
        for token in tokens:
            if token != self._processor.token:
                whole.append(token)
                keys.append(token)
                continue
            part = next(parts)
            for piece in self._pieces(part):
                if not isinstance(piece, Run):
                    whole += piece
                    keys += piece
                    continue
                _, digest, runs = items.setdefault(id(piece.item), (piece.item, _digest(piece.item), []))
                runs.append((len(whole), piece.first, piece.count))
                whole += [PLACEHOLDER] * piece.count
                keys += [digest + i.to_bytes(4, "little") for i in range(piece.first, piece.first + piece.count)]
            if len(whole) >= self._info.max_model_len:
                raise InvalidRequestError(
                    context_error(self._info.max_model_len, f"at least {len(whole)}", field="prompt"), param=part.param
                )
        option = [
            MediaItem(
                digest,
                item.data.shape,
                item.layout,
                item.count,
                runs,
                memoryview(item.data.tobytes()),
                item.data.dtype.str,
            )
            for item, digest, runs in items.values()
        ]
        text, salt = prompt.get("prompt"), prompt.get("cache_salt")
        ids = {"prompt_token_ids": whole, "prompt": text, "cache_salt": salt}
        return ReadPrompt(cast("Prompt", ids), keys, encoded(option, _PARAM))

    def _pieces(self, part: GivenPart) -> Sequence[list[int] | Run]:
        given, coarse = self._opener.open(part)
        try:
            return self._processor.pieces(given, coarse=coarse)
        except TooOddError as exc:
            raise InvalidRequestError(f"{part.param} {exc}.", param=part.param) from None


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, list | tuple) and not value)


def _digest(item: Item) -> bytes:
    """Return a digest of an item's data and shape."""
    form = item.data.dtype.str, item.data.shape, item.layout
    made = hashlib.blake2b(repr(form).encode(), digest_size=24)
    made.update(item.data.data if item.data.flags.c_contiguous else item.data.tobytes())
    return made.digest()
