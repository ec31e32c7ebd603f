"""Make the adapters in this folder with PEFT, and its outputs, for tests/golden/features/lora/test_peft_adapters.py.

    pip install peft==0.21.2 transformers
    python tests/data/peft/make.py

The base model and the adapters have random weights. `logits.safetensors` has PEFT's logits of `PROMPT` for each.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import peft
import torch
import transformers
from safetensors.torch import save_file

HERE = Path(__file__).parent
PROMPT = [5, 9, 33, 7, 40, 2, 18]
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS = {
    "patterns": peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=LINEAR,
        rank_pattern={r"layers\.1\.self_attn\.q_proj": 7, "down_proj": 2},
        alpha_pattern={"v_proj": 3},
    ),
    "magnitudes": peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=r".*\.(q_proj|down_proj)", use_dora=True, use_rslora=True
    ),
    "tables": peft.LoraConfig(
        r=3, lora_alpha=3, target_modules=["embed_tokens", "v_proj"], modules_to_save=["lm_head"]
    ),
    "tokens": peft.LoraConfig(
        r=2,
        lora_alpha=2,
        target_modules=["v_proj"],
        trainable_token_indices={"embed_tokens": [40, 7, 2], "lm_head": [5, 47]},
    ),
    "tied": peft.LoraConfig(r=2, lora_alpha=2, target_modules=["v_proj"], trainable_token_indices=[33, 9, 11]),
    "added-rows": peft.LoraConfig(r=2, lora_alpha=2, target_modules=["v_proj"], trainable_token_indices=[48, 50, 7]),
    "added-saved": peft.LoraConfig(
        r=2, lora_alpha=2, target_modules=["v_proj"], modules_to_save=["embed_tokens", "lm_head"]
    ),
    "activated": peft.LoraConfig(r=4, lora_alpha=8, target_modules=LINEAR, alora_invocation_tokens=[7, 40]),
}
"""Names of adapters; `tied` is for the base model `base-tied`, all others for `base`. Those of `ADDED` add tokens."""
ADDED = 3


def base_of(folder: str, adapter: str) -> transformers.PreTrainedModel:
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    if adapter.startswith("added"):
        model.resize_token_embeddings(model.config.vocab_size + ADDED)
    return model


def main() -> None:
    os.chdir(HERE)  # adapters have the path of their base model
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained("base")
    config.tie_word_embeddings = True
    with torch.random.fork_rng():
        transformers.LlamaForCausalLM(config).save_pretrained("base-tied")
    logits = {}
    for name, adapter in ADAPTERS.items():
        folder = "base-tied" if name == "tied" else "base"
        base = base_of(folder, name)
        adapter.task_type = "CAUSAL_LM"
        model = peft.get_peft_model(base, adapter)
        for parameter in model.parameters():
            if parameter.requires_grad:  # B is 0 in a new adapter, which would not show
                parameter.data.add_(torch.randn_like(parameter) * 0.2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.save_pretrained(name)
        Path(name, "README.md").unlink(missing_ok=True)
        loaded = peft.PeftModel.from_pretrained(base_of(folder, name), name).eval()
        prompt = [*PROMPT, 48, 49, 50] if name.startswith("added") else PROMPT
        with torch.no_grad():
            logits[name] = loaded(torch.tensor([prompt])).logits[0].contiguous()
    save_file(logits, "logits.safetensors")


if __name__ == "__main__":
    main()
