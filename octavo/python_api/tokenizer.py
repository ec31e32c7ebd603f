"""`ScriptTokenizer`: the tokenizer with the method names of Hugging Face's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from octavo.core.errors import InvalidRequestError
from octavo.text.chat.template import ChatTemplate, no_template_error
from octavo.text.tokenizers.no_tokenizer import needs_tokenizer
from octavo.text.tokenizers.tokenizer import Tokenizer


class ScriptTokenizer(Tokenizer):
    """The result of `LLM.get_tokenizer`. Like Hugging Face's, `decode` shows special tokens by default.

    Args:
        tokenizer: the tokenizer whose data is shared.
        chat: for `apply_chat_template`.
    """

    def __init__(self, tokenizer: Tokenizer, chat: ChatTemplate | None) -> None:
        if not tokenizer.present:
            raise needs_tokenizer()
        self.__dict__.update(vars(tokenizer))
        self._chat = chat

    def __len__(self) -> int:
        return self.vocab_size

    def __call__(self, text: str | Sequence[str], *, add_special_tokens: bool = True) -> dict[str, Any]:
        """Return `input_ids` and `attention_mask` of one text or of several, without padding."""
        texts = [text] if isinstance(text, str) else text
        made = [self.encode(part, add_special_tokens=add_special_tokens) for part in texts]
        masks = [[1] * len(tokens) for tokens in made]
        if isinstance(text, str):
            return {"input_ids": made[0], "attention_mask": masks[0]}
        return {"input_ids": made, "attention_mask": masks}

    def decode(self, ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        """Return the text of one token or of several."""
        return super().decode([ids] if isinstance(ids, int) else ids, skip_special_tokens=skip_special_tokens)

    def batch_decode(self, sequences: Iterable[Iterable[int]], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(ids, skip_special_tokens=skip_special_tokens) for ids in sequences]

    def get_vocab(self) -> dict[str, int]:
        """Return a dictionary from token, as the vocabulary writes it, to id."""
        vocab: dict[str, int] = self.backend.get_vocab(with_added_tokens=True)
        return vocab

    def convert_ids_to_tokens(self, ids: int | Iterable[int]) -> str | list[str | None] | None:
        """Return tokens as the vocabulary writes them; None for ids outside it."""
        if isinstance(ids, int):
            return self._token(ids)
        return [self._token(one) for one in ids]

    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> int | list[int | None] | None:
        """Return the ids of tokens as the vocabulary writes them; None for unknown ones."""
        if isinstance(tokens, str):
            return self._id(tokens)
        return [self._id(one) for one in tokens]

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> str | list[int]:
        """Render a conversation with the model's template, or another. Return its token ids or its text.

        Raises:
            InvalidRequestError: there is no template, or it can't render these messages.
        """
        template = self._chat if chat_template is None else ChatTemplate(chat_template, self)
        if template is None:
            raise no_template_error()
        if add_generation_prompt and continue_final_message:
            raise InvalidRequestError(
                "Cannot set both `continue_final_message` and `add_generation_prompt` to True. Choose one.",
                param="continue_final_message",
                value=True,
            )
        text = template.render(
            conversation,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=variables,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    @property
    def all_special_ids(self) -> list[int]:
        return sorted(self.special_ids)

    @property
    def bos_token_id(self) -> int | None:
        return self._named("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._named("eos_token")

    @property
    def pad_token(self) -> str | None:
        return self.named_tokens.get("pad_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._named("pad_token")

    @property
    def unk_token_id(self) -> int | None:
        return self._named("unk_token")

    def _named(self, name: str) -> int | None:
        text = self.named_tokens.get(name)
        return None if text is None else self._id(text)

    def _id(self, token: str) -> int | None:
        found: int | None = self.backend.token_to_id(token)
        return found

    def _token(self, number: int) -> str | None:
        found: str | None = self.backend.id_to_token(number) if number >= 0 else None
        return found
