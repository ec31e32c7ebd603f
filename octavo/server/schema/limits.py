"""This server's limits as JSON schema, which restrict the OpenAI document.

The types of the bodies are wider, because out-of-range values are refused with Octavo's own messages. The numbers have
the same source as those checks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

from octavo.core.params import MAX_BAD_WORDS, MAX_LOGPROB_TOKENS, MAX_PATTERN, RANGES, Range
from octavo.core.structured import MAX_CHOICES
from octavo.server.context import ServerContext
from octavo.server.openai.feature_fields import BUDGETS, FORM_TEXTS, RESPONSE_FORMATS
from octavo.server.openai.tools import MAX_TOOLS, NAME_PATTERN

Fragment = dict[str, Any]

_TEXT: Fragment = {"type": "string", "minLength": 1}
_NUMBERS = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "length_penalty",
    "temperature",
    "top_p",
    "min_p",
)


def limits(ctx: ServerContext, batch_urls: list[str]) -> Mapping[str, list[Fragment]]:
    """Return field, or "Body.field" -> restrictions of its parts by type, or "anyOf" to replace all."""
    return _sampling(ctx) | _forms() | _tokens(ctx) | _inputs(ctx) | _batches(batch_urls)


def _sampling(ctx: ServerContext) -> dict[str, list[Fragment]]:
    config, info = ctx.config, ctx.frontend.info
    most = info.max_model_len - 1
    told = Range(-1) if info.max_logprobs < 0 else Range(0, info.max_logprobs)
    made = {name: [bounded("number", RANGES[name])] for name in _NUMBERS}
    made |= {name: [bounded("integer", Range(1, config.max_n))] for name in ("n", "best_of")}
    made |= {
        name: [bounded("integer", Range(1, most))]
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens")
    }
    made |= {name: [bounded("integer", told)] for name in ("logprobs", "prompt_logprobs", "top_logprobs")}
    made |= {name: [bounded("integer", Range(-1))] for name in BUDGETS}
    stops = {"type": "array", "items": _TEXT, "maxItems": config.max_stop_strings}
    pattern = bounded("integer", Range(1, MAX_PATTERN))
    return made | {
        "min_tokens": [bounded("integer", Range(RANGES["min_tokens"].low, most))],
        "top_k": [bounded("integer", RANGES["top_k"])],
        "stream_interval": [bounded("integer", RANGES["stream_interval"])],
        "stop": [_TEXT, stops],
        "stop_sequences": [stops],
        "bad_words": [{"type": "array", "items": _TEXT, "maxItems": MAX_BAD_WORDS}],
        "logit_bias": [{"type": "object", "propertyNames": {"pattern": "^[0-9]{1,18}$"}}],
        "RepetitionRule.max_pattern_size": [pattern],
        "RepetitionRule.min_pattern_size": [pattern],
        "RepetitionRule.min_count": [bounded("integer", Range(2))],
    }


def _forms() -> dict[str, list[Fragment]]:
    """Return the restrictions of tools and structured output."""
    choices = [{"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_CHOICES}]
    return {name: [_TEXT] for name in FORM_TEXTS} | {
        "choice": choices,
        "guided_choice": choices,
        "ResponseFormat.type": [_one_of(*RESPONSE_FORMATS)],
        "tools": [{"type": "array", "maxItems": MAX_TOOLS}],
        "ToolBody.type": [_one_of("function")],
        "FunctionBody.name": [{"type": "string", "pattern": f"^{NAME_PATTERN}$"}],
        "ChatBody.tool_choice": [_one_of("none", "auto", "required"), _kinds("function", "allowed_tools")],
        "ResponseBody.tool_choice": [_one_of("none", "auto", "required"), _kinds("function", "allowed_tools")],
        "CountBody.tool_choice": [_kinds("auto", "none", "any", "tool")],
        "MessagesBody.tool_choice": [_kinds("auto", "none", "any", "tool")],
        "thinking": [_kinds("enabled", "disabled", "adaptive")],
        "truncation": [_one_of("disabled")],
    }


def _tokens(ctx: ServerContext) -> dict[str, list[Fragment]]:
    size = ctx.frontend.preparer.num_token_ids
    token = bounded("integer", Range(0, size - 1))
    several = {"type": "array", "items": token}
    absent: list[Fragment] = [{"anyOf": [{"type": "null"}]}]
    hooks = ctx.frontend.preparer.hooks
    return {name: [] if hook.present else absent for hook in hooks for name in hook.prompt_fields} | {
        "CompletionBody.prompt": [prompts(size, ctx.config.max_prompts)],
        "stop_token_ids": [several],
        "allowed_token_ids": [several | {"minItems": 1}],
        "logprob_token_ids": [several | {"maxItems": MAX_LOGPROB_TOKENS}],
        "label_token_ids": [several | {"maxItems": MAX_LOGPROB_TOKENS}],
        "GenerateBody.token_ids": [several],
        "DetokenizeBody.tokens": [
            {"type": "array", "items": bounded("integer", Range(0, ctx.frontend.tokenizer.vocab_size - 1))}
        ],
    }


def _inputs(ctx: ServerContext) -> dict[str, list[Fragment]]:
    info, size, most = ctx.frontend.info, ctx.frontend.preparer.num_token_ids, ctx.config.max_inputs
    return {
        "truncate_prompt_tokens": [bounded("integer", Range(-1, info.max_model_len)) | {"not": {"const": 0}}],
        "LabelsBody.items": [prompts(size, most)],
        "documents": [{"type": "array", "maxItems": most}],
    }


def _batches(urls: list[str]) -> dict[str, list[Fragment]]:
    return {"BatchBody.endpoint": [_one_of(*urls)]}


def prompts(vocab_size: int, most: int) -> Fragment:
    """Return the schema of a text, a list of texts, a prompt's token ids, or a list of those."""
    token = bounded("integer", Range(0, vocab_size - 1))
    tokens = {"type": "array", "items": token, "minItems": 1}
    several = {"type": "array", "minItems": 1, "maxItems": most}
    return {"anyOf": [{"type": "string"}, several | {"items": {"type": "string"}}, tokens, several | {"items": tokens}]}


def bounded(kind: str, allowed: Range) -> Fragment:
    """Return the schema of a number in a range."""
    low, high = (int(end) if math.isfinite(end) and end == int(end) else end for end in (allowed.low, allowed.high))
    bounds: Fragment = {"type": kind, "exclusiveMinimum" if allowed.above else "minimum": low}
    return bounds | ({} if math.isinf(high) else {"maximum": high})


def _one_of(*values: str) -> Fragment:
    return {"type": "string", "enum": list(values)}


def _kinds(*values: str) -> Fragment:
    """Return the schema of an object of one of these types."""
    return {"type": "object", "properties": {"type": {"enum": list(values)}}, "required": ["type"]}


def narrow(schema: Fragment, fragments: list[Fragment]) -> None:
    """Narrow a field's schema, in place."""
    for fragment in fragments:
        if "anyOf" in fragment:
            schema["anyOf"] = copy.deepcopy(fragment["anyOf"])
            continue
        for branch in schema.get("anyOf", [schema]):
            if branch.get("type") == fragment["type"]:
                _merge(branch, fragment)


def _merge(into: Fragment, fragment: Fragment) -> None:
    for key, value in fragment.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = copy.deepcopy(value)
