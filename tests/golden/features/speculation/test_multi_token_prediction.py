"""Drafts of a checkpoint's layer for multi-token prediction are those of `transformers`' layer of the same kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_families
import torch
import transformers
from head_reference import rms
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from toy_engine import drive, tiny_config, tokens_of

from octavo.build import build_core
from octavo.core.errors import ConfigError
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.features.speculation.heads.drafter import HeadDrafter
from octavo.hub.resolve import resolve
from octavo.worker.drafts import Drafting, Drafts

LAYERS = 2
QWEN, QWEN35, MIMO, ERNIE = "qwen3-next-moe", "qwen3.5", "mimo", "ernie-moe"
QWENS = (QWEN, QWEN35)
FAMILIES = {
    **tiny_families.MOE,
    **tiny_families.HYBRID_MOE,
    QWEN35: tiny_families.HYBRID[QWEN35],
    MIMO: (transformers.Qwen2Config, {}),
}
_THREE = {"layer_types": ["linear_attention", "full_attention", "full_attention"]}
CHANGES: dict[str, dict[str, Any]] = {
    QWEN: _THREE,
    QWEN35: _THREE,
    MIMO: {"head_dim": 8, "intermediate_size": 48},
}


def saved(family: str, folder: Path) -> tuple[Any, Any, dict[str, Tensor]]:
    """Save a model with such a layer; return it, a model that has the layer as its last, and the head's own tensors."""
    config_type, settings = FAMILIES[family]
    settings = {"vocab_size": 97, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, **settings}
    settings |= CHANGES.get(family, {})
    torch.manual_seed(7)
    longer = {**settings, "num_hidden_layers": LAYERS + 1, "initializer_range": 0.2}
    if family == ERNIE:  # its layer has no experts
        longer["moe_layer_end_index"] = LAYERS - 1
    long = transformers.AutoModelForCausalLM.from_config(config_type(**longer), attn_implementation="eager").eval()
    kinds = {name: kinds[:LAYERS] for name, kinds in settings.items() if name == "layer_types"}
    short = transformers.AutoModelForCausalLM.from_config(
        config_type(**{**settings, **kinds, "num_hidden_layers": LAYERS}), attn_implementation="eager"
    ).eval()
    short.load_state_dict({k: v for k, v in long.state_dict().items() if f"layers.{LAYERS}." not in k})
    long.save_pretrained(folder)
    size, at = long.config.hidden_size, f"model.layers.{LAYERS}"
    own = {
        f"{at}.enorm.weight": 1 + 0.2 * torch.randn(size),
        f"{at}.hnorm.weight": 1 + 0.2 * torch.randn(size),
        f"{at}.eh_proj.weight": 0.3 * torch.randn(size, 2 * size),
        f"{at}.shared_head.norm.weight": 1 + 0.2 * torch.randn(size),
    }
    if family == ERNIE:
        del own[f"{at}.shared_head.norm.weight"]
    file, path = folder / "model.safetensors", folder / "config.json"
    tensors = {published(name, family): tensor for name, tensor in {**load_file(file), **own}.items()}
    config = json.loads(path.read_text()) | {"num_hidden_layers": LAYERS}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:LAYERS]
    config.pop("mlp_layer_types", None)  # published ones have numbers of layers instead
    if family not in QWENS:
        config["num_nextn_predict_layers"] = 1
    if family == MIMO:
        config["architectures"] = ["MiMoForCausalLM"]
    if family == QWEN35:  # the text half of a model with images, as published
        tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
        config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": config}
    save_file(tensors, file)
    path.write_text(json.dumps(config))
    return short, long, own


PUBLISHED: dict[str, dict[str, str]] = {
    QWEN: {
        "enorm": "mtp.pre_fc_norm_embedding",
        "hnorm": "mtp.pre_fc_norm_hidden",
        "eh_proj": "mtp.fc",
        "shared_head.norm": "mtp.norm",
        "": "mtp.layers.0",
    },
    MIMO: {
        "enorm": "model.mtp_layers.0.token_layernorm",
        "hnorm": "model.mtp_layers.0.hidden_layernorm",
        "eh_proj": "model.mtp_layers.0.input_proj",
        "shared_head.norm": "model.mtp_layers.0.final_layernorm",
        "": "model.mtp_layers.0",
    },
    ERNIE: {
        "enorm": "model.mtp_emb_norm.0",
        "hnorm": "model.mtp_hidden_norm.0",
        "eh_proj": "model.mtp_linear_proj.0",
        "": "model.mtp_block.0",
    },
}
PUBLISHED[QWEN35] = PUBLISHED[QWEN]
"""Family -> the names in its checkpoints of the modules that DeepSeek's have in `model.layers.N`."""


def published(name: str, family: str) -> str:
    """The name in the family's checkpoints of a tensor that DeepSeek's would call `name`."""
    at, names = f"model.layers.{LAYERS}.", PUBLISHED.get(family)
    if names is None or not name.startswith(at):
        return name
    inner = name.removeprefix(at)
    module = inner.removesuffix(".weight")
    return f"{names[module]}.weight" if module in names else f"{names['']}.{inner}"


def reference(family: str, short: Any, long: Any, own: dict[str, Tensor], tokens: list[int], count: int) -> list[int]:
    """DeepSeek-V3's section 2.2 (https://arxiv.org/abs/2412.19437), over the whole sequence for each draft.

    Qwen and MiMo go on with states behind the last norm, which ERNIE has not; Qwen, whose norms are stored less 1, has
    an embedding in the first pair; MiMo projects state and embedding in this order.
    """
    at, eps = f"model.layers.{LAYERS}", long.config.rms_norm_eps
    own = {name: weight + 1 if family in QWENS and "norm" in name else weight for name, weight in own.items()}
    h = short(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0][:-1]
    following, drafts = tokens[1:], []
    for _ in range(count):
        embedded = long.model.embed_tokens.weight[torch.tensor(following)].clone()
        if family not in QWENS:
            embedded[0] = 0
        pair = [rms(embedded, own[f"{at}.enorm.weight"], eps), rms(h, own[f"{at}.hnorm.weight"], eps)]
        joined = torch.cat(pair[::-1] if family == MIMO else pair, -1)
        x = F.linear(joined, own[f"{at}.eh_proj.weight"])[None]
        places = torch.arange(len(following))[None]
        mask = torch.full((len(following), len(following)), float("-inf")).triu(1)[None, None]
        out = long.model.layers[LAYERS](
            x, attention_mask=mask, position_ids=places, position_embeddings=long.model.rotary_emb(x, places)
        )
        out = (out[0] if isinstance(out, tuple) else out)[0, -1:]
        normed = out if family == ERNIE else rms(out, own[f"{at}.shared_head.norm.weight"], eps)
        drafts.append(int(F.linear(normed, long.lm_head.weight)[0].argmax()))
        following.append(drafts[-1])
        h = torch.cat([h, normed if family in (*QWENS, MIMO) else out])
    return drafts


@pytest.mark.parametrize("family", ["deepseek-v3", "glm4-moe", "glm4-moe-lite", QWEN, QWEN35, MIMO, ERNIE])
def test_drafts_are_the_references(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short, long, own = saved(family, tmp_path)
    proposed: list[tuple[list[int], list[int]]] = []
    propose = HeadDrafter.propose

    def noting(self: HeadDrafter, drafting: Drafting, payload: Any) -> Drafts | None:
        drafts = propose(self, drafting, payload)
        assert drafts is not None
        for row, slot in enumerate(drafting.slots.tolist()):
            known = drafting.tokens[slot, : int(drafting.length[slot])].tolist()
            proposed.append((known, drafts.tokens[row, : int(drafts.counts[row])].tolist()))
        return drafts

    monkeypatch.setattr(HeadDrafter, "propose", noting)
    config = {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False, "prompt_lookup_min": 0}
    settings = {"load_format": "auto", "max_num_batched_tokens": 16, "max_num_seqs": 3}
    settings |= {"device": "cpu"} if family in QWENS else {}  # a GPU has no drafts beside recurrent layers
    loop, _ = build_core(tiny_config(**settings, speculative_config=config), resolve(str(tmp_path)))
    proposed.clear()  # those of the warm-up
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    asked = [GenerateRequest(id=str(n), tokens=list(range(3 + n, 3 + n + n * 9)), params=params) for n in (1, 2)]
    assert len(tokens_of(drive(loop, asked))) == 2
    assert len(proposed) > 3  # on a GPU only those of prompts: steps that are replayed run no Python
    with torch.no_grad():
        for known, drafts in proposed:
            assert drafts == reference(family, short, long, own, known, len(drafts))
    loop.close()


def test_a_model_without_such_layers_is_refused() -> None:
    from toy_models import model_files

    with pytest.raises(ConfigError, match="num_nextn_predict_layers in its config"):
        build_core(tiny_config(speculative_config={"method": "mtp"}), model_files())
