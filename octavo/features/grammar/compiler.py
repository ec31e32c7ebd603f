"""`Compiler`: compile grammars in threads, so that the step loop never waits, and cache them."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from octavo.core.errors import InvalidRequestError
from octavo.core.structured import FramePart, StructuredOutputsParams
from octavo.features.grammar.defaults import NO_DEFAULTS, StructuredDefaults
from octavo.features.grammar.lower import lower, with_options
from octavo.features.grammar.mending import Fault, mended

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from octavo.text.tokenizers.tokenizer import Tokenizer

MAX_KEPT = 256
MAX_KEPT_BYTES = 16 << 20
_THREADS = 2
_STACK_BYTES = 512 << 20
"""llguidance recurses along chains of rules and references: up to 8 KB for each of 65,525 symbols, and 2.7 KB for each
of 120,000 terminals in 1 MiB of text. Only the used part of a stack takes memory."""
_MAX_REASON, _MAX_SHOWN = 500, 100
_NOT_FOR_USERS = re.compile(r"\n?<(?:backtrace|non-verbose/?|state)>")
"""What llguidance appends to a reason: its stack, or a note on omitted state."""

_TOO_LARGE, _PANIC = "panic: assertion failed: grammar.symbols", "panic:"
"""llguidance's reasons for a grammar of more than 65,525 symbols, and for its other faults."""
_NO_OUTPUT = "NoExtensionBias"
"""llguidance's reason for a grammar without a possible first token."""
_LOOPS = {"json": "one of its $ref", "grammar": "one of its rules", "structural_tag": "one of its $ref"}


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar in its initial state.

    Attributes:
        matcher: must be copied before use.
        first: [words] int32, bit mask of the possible first tokens.
    """

    matcher: LLMatcher
    first: NDArray[np.int32]


class Compiler:
    """Cache of compiled grammars, keyed by request option. `open` may be called from one thread only.

    At most `MAX_KEPT` grammars of at most `MAX_KEPT_BYTES` of source are kept, least recently used evicted first.
    Failures are cached too.
    """

    def __init__(
        self,
        load_tokenizer: Callable[[], Tokenizer],
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        defaults: StructuredDefaults = NO_DEFAULTS,
    ) -> None:
        self.vocab_size = vocab_size
        self._load_tokenizer = load_tokenizer
        self._defaults = defaults
        self._eos = list(eos_token_ids)
        self._kept: OrderedDict[bytes, Future[CompiledGrammar]] = OrderedDict()
        self._kept_bytes = 0
        self._threads: ThreadPoolExecutor | None = None
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()

    def open(self, option: msgspec.Raw) -> Future[CompiledGrammar]:
        """Return a future of the compiled grammar; it fails with InvalidRequestError."""
        key = bytes(option)
        future = self._kept.get(key)
        if future is None:
            self._threads = self._threads or _started()
            future = self._threads.submit(self._compile, key)
            self._kept[key] = future
            self._kept_bytes += len(key)
            while len(self._kept) > MAX_KEPT or (self._kept_bytes > MAX_KEPT_BYTES and len(self._kept) > 1):
                gone, _ = self._kept.popitem(last=False)
                self._kept_bytes -= len(gone)
        else:
            self._kept.move_to_end(key)
        return future

    def _compile(self, key: bytes) -> CompiledGrammar:
        params = self._defaults.applied(msgspec.msgpack.decode(key, type=StructuredOutputsParams))
        try:
            return self._compiled(params)
        except RecursionError:
            text = f"{params.form} of {params.param} is nested too deeply; llguidance takes about 100 levels."
            raise InvalidRequestError(text, param=params.param) from None

    def _compiled(self, params: StructuredOutputsParams) -> CompiledGrammar:
        made = self._made(lower(params))
        if made.matcher.is_error() and params.parts and not made.matcher.get_error().startswith(_TOO_LARGE):
            made = self._made(lower(self._with_usable_parts(params)))
        if made.matcher.is_error():
            raise InvalidRequestError(_reason(params, made.matcher.get_error()), param=params.param)
        return made

    def _made(self, grammar: str) -> CompiledGrammar:
        """Compile a grammar; the matcher may be in an error."""
        matcher = LLMatcher(self._with_tokenizer(), grammar, log_level=0, limits=_limits())
        first = np.zeros(-(-self.vocab_size // 32), dtype=np.int32)
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(first.ctypes.data, first.nbytes)
        return CompiledGrammar(matcher, first)

    def _with_usable_parts(self, params: StructuredOutputsParams) -> StructuredOutputsParams:
        """Return the form without the keywords of its parts that can't be enforced.

        Raises:
            InvalidRequestError: a strict part has one.
        """
        return msgspec.structs.replace(params, parts=tuple(self._usable(part, params.param) for part in params.parts))

    def _usable(self, part: FramePart, param: str) -> FramePart:
        def error_of(schema: dict[str, Any]) -> str:
            grammar = json.dumps({"grammars": [{"json_schema": with_options(schema, part)}]})
            matcher = self._made(grammar).matcher
            return _plain(matcher.get_error()) if matcher.is_error() else ""

        schema, faults = mended(json.loads(part.schema), error_of)
        if part.strict and faults:
            raise InvalidRequestError(_fault_text(part, faults[0]), param=param)
        if faults and error_of(schema):  # more faults than are looked for
            schema = {"type": "object"} if schema.get("type") == "object" else {}
        return msgspec.structs.replace(part, schema=json.dumps(schema))

    def _with_tokenizer(self) -> LLTokenizer:
        """Return the tokenizer in llguidance's form; the first thread that calls makes it."""
        with self._lock:
            if self._tokenizer is None:
                source = _of_logits(self._load_tokenizer().backend, self.vocab_size)
                eos = [token for token in self._eos if token < self.vocab_size]
                self._tokenizer = LLTokenizer(source, n_vocab=self.vocab_size, eos_token=eos or None)
            return self._tokenizer


def _of_logits(backend: Backend, vocab_size: int) -> str:
    """Return the tokenizer's JSON without added tokens for which the model has no logits: llguidance takes none."""
    source = backend.to_str()
    if all(token < vocab_size for token in backend.get_added_tokens_decoder()):
        return source
    given = json.loads(source)
    given["added_tokens"] = [one for one in given["added_tokens"] if one["id"] < vocab_size]
    return json.dumps(given)


def _started() -> ThreadPoolExecutor:
    """Return the pool with all its threads started."""
    pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar-compile")
    all_started = threading.Barrier(_THREADS)
    before = threading.stack_size(_STACK_BYTES)
    try:
        for _ in range(_THREADS):
            pool.submit(all_started.wait)
    except RuntimeError:  # no address space for such a stack
        all_started.abort()
    finally:
        threading.stack_size(before)
    return pool


def _limits() -> LLParserLimits:
    return LLParserLimits(verbose_errors=False)


def _plain(error: str) -> str:
    return _NOT_FOR_USERS.split(error, maxsplit=1)[0].strip()


def _fault_text(part: FramePart, fault: Fault) -> str:
    path = ".".join(one for one in (part.path, fault.path) if one)
    value = json.dumps(fault.value, ensure_ascii=False)
    shown = value if len(value) <= _MAX_SHOWN else f"{value[:_MAX_SHOWN]}..."
    reason = "no output can match it" if fault.reason == _NO_OUTPUT else fault.reason.rpartition("\nerror: ")[2]
    return (
        f"The schema of {part.where} can't be enforced: {fault.keyword} {f'in {path}' if path else 'at its top'} is "
        f"{shown}, and llguidance says: {reason[:_MAX_REASON]}. Correct it, leave it out, or set strict to false."
    )


def _reason(params: StructuredOutputsParams, error: str) -> str:
    names = {"json": "JSON schema", "json_object": "JSON schema", "regex": "regular expression", "frame": "form"}
    what = names.get(params.form, params.form.replace("_", " "))
    text = _plain(error)
    if text.startswith(_TOO_LARGE):
        text = "it is too large for a grammar. Make it simpler, or offer fewer tools."
    elif text.startswith(_PANIC):
        text = "llguidance fails on it. Make it simpler."
    if text == _NO_OUTPUT:
        loop = _LOOPS.get(params.form)
        text = "no output can match it. " + (
            f"Most likely {loop} leads back to itself with nothing in between; give it an alternative that ends."
            if loop
            else "Correct it."
        )
    return f"The {what} of {params.param} can't be used: {text[:_MAX_REASON]}{'...' if len(text) > _MAX_REASON else ''}"
