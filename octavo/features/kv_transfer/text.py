"""The text half: reads `kv_transfer_params`, and puts what is offered into the answer."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.core.errors import InvalidRequestError, UnsupportedError
from octavo.core.output import CompletionOutput
from octavo.core.params import SamplingParams
from octavo.features.kv_transfer.offer import NAME, PARAM, Ask, Fetch, Local, Offer, Option, Send
from octavo.features.kv_transfer.settings import TransferInfo
from octavo.text.hooks import Idle, TextContext, TextHook, encoded, num_prompts

_SWITCHES = "do_remote_decode", "do_remote_prefill"


class TransferText(TextHook):
    name = NAME
    body_fields = (PARAM,)

    def __init__(self, context: TextContext) -> None:
        super().__init__(context)
        self._info = context.info.facts(NAME, TransferInfo)

    def start_rows(self) -> list[tuple[str, str]]:
        info = self._info
        if info is None:
            return []
        parts = []
        if info.config.sends:
            parts.append("sends them to servers that ask for them")
        if info.config.fetches:
            servers = ", ".join(info.asks) or "servers that requests name"
            parts.append(f"fetches them from {servers}")
        return [("KV blocks", " and ".join(parts))]

    def params_of(self, body: Any, *, max_bytes: int) -> dict[str, Any]:
        given = getattr(body, PARAM, None)
        if not given:
            return {}
        if not isinstance(given, dict):
            raise InvalidRequestError(f"{PARAM} must be an object.", param=PARAM, value=given)
        if num_prompts(body) > 1:
            text = f"{PARAM} describes one prompt, but the request has {num_prompts(body)}. Send a request for each."
            raise InvalidRequestError(text, param=PARAM, value=given)
        if given.get("do_remote_decode") and getattr(body, "stream", None):
            text = f"{PARAM}: do_remote_decode needs stream=false: what is kept is in the whole answer."
            raise InvalidRequestError(text, param="stream", value=True)
        return {"feature_args": {NAME: given}}

    def idle(self, body: Any) -> list[Idle]:
        """Report parameters beside several conversations, which are prepared one by one."""
        given = getattr(body, PARAM, None)
        if not given or getattr(body, "prompt", None) or num_prompts(body) == 1:
            return []
        return [Idle(PARAM, given, "it describes one prompt. Send a request for each conversation")]

    def option(self, params: SamplingParams, text: str | None, tokens: list[int]) -> msgspec.Raw | None:
        given = (params.feature_args or {}).get(NAME)
        option = self._usual(params, tokens) if given is None else self._asked(given)
        return None if option is None else encoded(option, PARAM)

    def _usual(self, params: SamplingParams, tokens: list[int]) -> Option | None:
        """The option of a request that says nothing of it."""
        info = self._info
        if info is None or not info.asks or len(tokens) < info.config.min_tokens:
            return None
        reads = params.prompt_logprobs is None and not params.skip_reading_prefix_cache
        return Ask() if reads else None

    def _asked(self, given: dict[str, Any]) -> Option | None:
        odd = next((name for name in _SWITCHES if not isinstance(given.get(name), bool | None)), None)
        if odd is not None:
            text = f"{PARAM}: {odd} must be true or false, got {given[odd]!r}."
            raise InvalidRequestError(text, param=PARAM, value=given)
        sends, fetches = (bool(given.get(name)) for name in _SWITCHES)
        if sends and fetches:
            text = f"{PARAM} has both {' and '.join(_SWITCHES)}; set one of them."
            raise InvalidRequestError(text, param=PARAM, value=given)
        if not sends and not fetches:
            return Local()
        self._check_role("do_remote_decode" if sends else "do_remote_prefill", given, sends=sends)
        return Send() if sends else Fetch(self._offer(given))

    def _check_role(self, name: str, given: dict[str, Any], *, sends: bool) -> None:
        info = self._info
        if info is None or not (info.config.sends if sends else info.config.fetches):
            role = "kv_producer" if sends else "kv_consumer"
            raise UnsupportedError(
                f"{PARAM}: {name} needs a server that was started with "
                f'--kv-transfer-config \'{{"kv_role": "{role}"}}\' (or kv_both).',
                param=PARAM,
                value=given,
            )

    def _offer(self, given: dict[str, Any]) -> Offer:
        try:
            offer = msgspec.convert(given, Offer)
        except msgspec.ValidationError as error:
            text = f"{PARAM} is not what a server answered to do_remote_decode: {error}. Pass that on unchanged."
            raise InvalidRequestError(text, param=PARAM, value=given) from None
        info = self._info
        for host, _ in offer.remote_ranks:
            if info is not None and not info.config.allows(host):
                raise InvalidRequestError(
                    f"{PARAM} names the host {host!r}, from which this server fetches no KV blocks. Add it to peers of "
                    "--kv-transfer-config, or set kv_ip of the server that answered.",
                    param=PARAM,
                    value=given,
                )
        return offer

    def answer(self, output: CompletionOutput, data: bytes) -> None:
        output.extra = {**(output.extra or {}), PARAM: msgspec.msgpack.decode(data)}


TEXT = TransferText
