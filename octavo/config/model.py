"""Settings of the model."""

from dataclasses import dataclass
from typing import Any, Literal

from octavo.core import parsing, quantities
from octavo.core.errors import ConfigError
from octavo.core.flag import setting
from octavo.core.params import LogprobsMode

DEFAULT_MODEL = "smollm2"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model to run, and how. The help text of a setting describes what it does; this describes its values.

    Attributes:
        tokenizer_revision: None takes the model's, or the newest one if the tokenizer is in another repository.
        rope_scaling, rope_theta: the same as two fields of `hf_overrides`, by their older flags.
        dtype: "auto" takes the checkpoint's, or float32 on machines without fast bfloat16; quantized weights stay
            integers if the machine has kernels for them. All weights are converted to any other dtype.
        activation_dtype: rounding of activations that are multiplied by integer weights (on a CPU, if no dtype is
            set): "int16" is as exact as bfloat16, "int8" computes prompts up to twice as fast. "bfloat16" also rounds
            the weights to bfloat16 in each product: with AMX the fastest for prompts and batches, but not for a
            single request.
        quantization: None takes the weights as they are stored. A quantized checkpoint's own method changes nothing.
        head_dtype: "auto" keeps the head as the checkpoint stores it; "int8" rounds one that is not quantized to 8-bit
            integers with a scale per 32 inputs, and with it the embeddings if the two share a table.
        self_check: None checks a form of weights unless its smallest layer is large (`worker/self_check.py`).
        load_format: "auto" depends on the files found; "dummy" makes random weights.
        max_model_len: None takes the model's, reduced to what the KV cache holds.
        logprobs_mode: log-probabilities or logits, "raw" (of the model) or "processed" (after penalties, bans,
            temperature and filters).
        generation_config: "auto" for the model's generation_config.json, a folder with another one, or "none" (also
            "vllm") for the defaults of `SamplingParams`.
    """

    model: str = setting(DEFAULT_MODEL, "same as the positional MODEL", metavar="MODEL")
    tokenizer: str | None = setting(
        None, "take the tokenizer from this model instead", shown="the model's", metavar="MODEL"
    )
    revision: str | None = setting(None, "branch, tag or commit of a Hugging Face id", shown="main")
    tokenizer_revision: str | None = setting(None, "revision of the tokenizer", shown="the model's")
    skip_tokenizer_init: bool = setting(
        False, "run without a tokenizer: prompts and outputs are token ids only", aliases=("tokens-only",)
    )
    allow_special_in_content: bool = setting(
        False, "parse special tokens spelled in the contents of messages, instead of treating them as text"
    )
    download_dir: str | None = setting(
        None,
        "folder for downloaded models",
        shown="Hugging Face's cache; for the catalogue, Octavo's",
        metavar="FOLDER",
    )
    hf_overrides: dict[str, Any] = setting(
        {}, 'fields that replace those of the model\'s config, as a JSON object: {"max_position_embeddings": 65536}'
    )
    rope_scaling: dict[str, Any] = setting(
        {}, 'rotary scaling in place of the model\'s, as JSON: {"rope_type": "yarn", "factor": 4.0}'
    )
    rope_theta: float | None = setting(
        None, "rotary base in place of the model's", shown="the model's", read=quantities.positive
    )
    disable_sliding_window: bool = setting(
        False, "compute full attention in every layer, and limit requests to the model's window"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto",
        "dtype that weights and activations are computed in",
        read=parsing.dtype,
        choices=("auto", "float32", "bfloat16", "float16", "float", "half"),
    )
    activation_dtype: Literal["int16", "int8", "bfloat16"] = setting(
        "int16",
        "precision of activations multiplied with quantized weights on a CPU: int8 is faster on long prompts, "
        "int16 more exact; with AMX, bfloat16 is the fastest on prompts and batches, but slower for a single "
        "request",
    )
    quantization: str | None = setting(
        None,
        "on a GPU, quantize unquantized weights as they are loaded: fp8, w8a8, w8a16 or w4a16; a quantized checkpoint "
        "needs no flag",
        shown="none",
        read=parsing.method,
        metavar="METHOD",
        aliases=("-q",),
    )
    head_dtype: Literal["auto", "int8"] = setting(
        "auto",
        "on a CPU, int8 quantizes the output head (and embeddings tied to it) to 8-bit integers: with quantized "
        "layers, reading the head is a large part of each step",
    )
    self_check: bool | None = setting(
        None,
        "before serving, compare some products of each form of packed weights with those of the dequantized weights; "
        "by default in layers of up to 32M weights, which takes less than 0.2 s",
        shown="small layers",
        switch=True,
    )
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = setting(
        "auto", "how to read the weights; dummy makes random ones"
    )
    max_model_len: int | None = setting(
        None,
        "prompt plus output of one request, in tokens (8k, 32K); auto fits the KV cache",
        shown="auto",
        read=quantities.context_length,
        metavar="TOKENS",
    )
    runner: Literal["auto", "generate", "pooling"] = setting(
        "auto", "generate text, or only compute embeddings (pooling); auto depends on the checkpoint"
    )
    convert: Literal["auto", "none", "embed"] = setting(
        "auto", "embed turns a generative model into an embedding model, as --runner pooling does"
    )
    max_logprobs: int = setting(
        20,
        "largest `logprobs` and `prompt_logprobs` of a request; -1 for no limit",
        read=quantities.count_or_all,
        metavar="N",
    )
    logprobs_mode: LogprobsMode = setting(
        "raw_logprobs", "what `logprobs` report: raw logits or those that the token is sampled from, normalized or not"
    )
    stream_interval: int = setting(
        1,
        "tokens per streamed chunk, except the first and the last; requests may set more",
        read=quantities.count,
        metavar="N",
    )
    generation_config: str = setting(
        "auto",
        "where sampling defaults come from: auto (the model's generation_config.json, or what the catalogue "
        "recommends), a folder with another one, or none",
        metavar="PLACE",
    )
    override_generation_config: dict[str, Any] = setting(
        {}, "individual sampling defaults that override those, as a JSON object"
    )
    enable_sleep_mode: bool = setting(
        False, "allow requests to release the memory of KV cache and weights for a while (/sleep)"
    )
    seed: int = setting(
        0, "seed for random weights, and for requests without one", read=quantities.natural, metavar="N"
    )

    @property
    def config_overrides(self) -> dict[str, Any]:
        """Return the overridden fields of the model's config and their values, from all three settings.

        Raises:
            ConfigError: a field is given by two settings.
        """
        older = {name: value for name in ("rope_scaling", "rope_theta") if (value := getattr(self, name))}
        twice = next((name for name in older if name in self.hf_overrides), None)
        if twice is not None:
            raise ConfigError(f"--hf-overrides {twice} and --{twice.replace('_', '-')} are both given; leave one out.")
        return self.hf_overrides | older
