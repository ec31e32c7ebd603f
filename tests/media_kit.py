"""What the tests of images and of audio share: checkpoints, runs of the invariance tests, a server."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from tiny import vary_vectors

from octavo import LLM, SamplingParams

if TYPE_CHECKING:
    from serving import Server

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
"""Of the decoder; a kind adds the size of its vocabulary."""
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant: {% endif %}"
)

BASE: dict[str, Any] = {
    "dtype": "float32",
    "kv_cache_memory_bytes": 2 << 20,
    "threads": 1,
    "max_model_len": 256,
    "block_size": 16,
    "max_num_seqs": 8,
}


def answers(folder: Path, prompts: Sequence[Any], **settings: Any) -> tuple[list[list[list[int]]], int]:
    """Each choice's tokens, twice the same, and how many requests were preempted."""
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    drawn = greedy.replace(temperature=1.0, seed=5, n=2)
    params = [drawn if i % 4 == 3 else greedy for i in range(len(prompts))]
    with LLM(str(folder), **BASE | settings) as llm:
        found = llm.generate(list(prompts), params)
        again = llm.generate(list(prompts)[::-1], params[::-1])[::-1]
        tokens = [[list(choice.token_ids) for choice in output.outputs] for output in found]
        assert tokens == [[list(choice.token_ids) for choice in output.outputs] for output in again]
        return tokens, llm.stats().num_preemptions


def answers_alone(folder: Path, prompts: Sequence[Any], device: str) -> list[list[list[int]]]:
    """The tokens of each request alone, and without a cache of prefixes. Devices draw differently."""
    return answers(folder, prompts, max_num_seqs=1, enable_prefix_caching=False, device=device)[0]


def saved(name: str, halves: Mapping[str, Any], folder: Path, seed: int) -> Any:
    """Write a checkpoint with random weights, and return Transformers' model of it.

    Args:
        name: beginning of the classes' names.
        halves: fields of the configuration.
    """
    config = getattr(transformers, f"{name}Config")(**halves)
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForConditionalGeneration")._from_config(config, dtype=torch.float32).eval()
    vary_vectors(model)
    with torch.no_grad():
        for matrix in model.parameters():  # Gemma 3's projector begins with zeros
            if matrix.dim() > 1 and not matrix.any():
                matrix.normal_(std=0.15)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return model


def save_tokenizer(own: Any, folder: Path, modality: str, place: str) -> None:
    """Write a tokenizer, and a template that writes `place` for a part of this modality."""
    own.save(str(folder / "tokenizer.json"))
    template = TEMPLATE.replace("'image'", f"'{modality}'").replace("IMAGE", place)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


def greedy(model: Any, inputs: Any, count: int) -> tuple[list[int], list[int]]:
    """The prompt's tokens, and `count` greedy ones after them, of Transformers."""
    with torch.no_grad():
        found = model.generate(**inputs, do_sample=False, max_new_tokens=count, min_new_tokens=count)
    size = inputs["input_ids"].shape[1]
    return inputs["input_ids"][0].tolist(), found[0, size:].tolist()


def logits(model: Any, inputs: Any) -> torch.Tensor:
    """Of the token after the prompt."""
    with torch.no_grad():
        found: torch.Tensor = model(**inputs).logits[0, -1].float()
    return found


@contextlib.contextmanager
def served(folder: Path, log: Path, *flags: str) -> Iterator[Server]:
    """A server of a tiny model, which must end without a traceback."""
    from serving import Server

    common = ("--kv-cache-memory-bytes", "8M", "--max-model-len", "512", "--threads", "1", "--dtype", "float32")
    server = Server(str(folder), log, *common, *flags)
    try:
        server.wait_ready()
        yield server
        server.wait_idle()
        assert server.stop() == 0, server.output()
        assert "Traceback" not in server.output(), server.output()
    finally:
        server.close()
