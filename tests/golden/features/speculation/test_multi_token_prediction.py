"""Drafts of a checkpoint's layer for multi-token prediction are those of `transformers`' layer of the same kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_families
import torch
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
QWEN = ("qwen3-next-moe",)


def saved(family: str, folder: Path) -> tuple[Any, Any, dict[str, Tensor]]:
    """Save a model with such a layer; return it, a model that has the layer as its last, and the head's own tensors."""
    import transformers

    config_type, settings = {**tiny_families.MOE, **tiny_families.HYBRID_MOE}[family]
    settings = {"vocab_size": 97, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, **settings}
    torch.manual_seed(7)
    kinds = {"layer_types": ["linear_attention", *["full_attention"] * LAYERS]} if family in QWEN else {}
    longer = config_type(**{**settings, **kinds, "num_hidden_layers": LAYERS + 1, "initializer_range": 0.2})
    kinds = {name: kind[:LAYERS] for name, kind in kinds.items()}
    long = transformers.AutoModelForCausalLM.from_config(longer, attn_implementation="eager").eval()
    short = transformers.AutoModelForCausalLM.from_config(
        config_type(**{**settings, **kinds, "num_hidden_layers": LAYERS}), attn_implementation="eager"
    ).eval()
    short.load_state_dict({k: v for k, v in long.state_dict().items() if f"layers.{LAYERS}." not in k})
    long.save_pretrained(folder)
    size, at = longer.hidden_size, f"model.layers.{LAYERS}"
    own = {
        f"{at}.enorm.weight": 1 + 0.2 * torch.randn(size),
        f"{at}.hnorm.weight": 1 + 0.2 * torch.randn(size),
        f"{at}.eh_proj.weight": 0.3 * torch.randn(size, 2 * size),
        f"{at}.shared_head.norm.weight": 1 + 0.2 * torch.randn(size),
    }
    file = folder / "model.safetensors"
    tensors = {**load_file(file), **own}
    path = folder / "config.json"
    config = json.loads(path.read_text()) | kinds | {"num_hidden_layers": LAYERS}
    if family in QWEN:
        tensors = {qwen_name(name, at): tensor for name, tensor in tensors.items()}
    else:
        config["num_nextn_predict_layers"] = 1
    save_file(tensors, file)
    path.write_text(json.dumps(config))
    return short, long, own


def qwen_name(name: str, at: str) -> str:
    """The name in Qwen3-Next's checkpoints of a tensor that DeepSeek's would call `name`."""
    own = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "shared_head.norm": "norm"}
    if not name.startswith(f"{at}."):
        return name
    inner = name.removeprefix(f"{at}.")
    module = inner.removesuffix(".weight")
    return f"mtp.{own[module]}.weight" if module in own else f"mtp.layers.0.{inner}"


def reference(short: Any, long: Any, own: dict[str, Tensor], tokens: list[int], count: int) -> list[int]:
    """DeepSeek-V3's section 2.2 (https://arxiv.org/abs/2412.19437), over the whole sequence for each draft. Qwen goes
    on with states behind the norm, whose weights are stored less 1, and has an embedding in the first pair."""
    at, eps, qwen = f"model.layers.{LAYERS}", long.config.rms_norm_eps, long.config.model_type == "qwen3_next"
    own = {name: weight + 1 if qwen and "norm" in name else weight for name, weight in own.items()}
    h = short(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0][:-1]
    following, drafts = tokens[1:], []
    for _ in range(count):
        embedded = long.model.embed_tokens.weight[torch.tensor(following)].clone()
        if not qwen:
            embedded[0] = 0
        pair = [_norm(embedded, own[f"{at}.enorm.weight"], eps), _norm(h, own[f"{at}.hnorm.weight"], eps)]
        x = F.linear(torch.cat(pair, -1), own[f"{at}.eh_proj.weight"])[None]
        places = torch.arange(len(following))[None]
        mask = torch.full((len(following), len(following)), float("-inf")).triu(1)[None, None]
        out = long.model.layers[LAYERS](
            x, attention_mask=mask, position_ids=places, position_embeddings=long.model.rotary_emb(x, places)
        )
        out = (out[0] if isinstance(out, tuple) else out)[0, -1:]
        normed = _norm(out, own[f"{at}.shared_head.norm.weight"], eps)
        logits = F.linear(normed, long.lm_head.weight)
        drafts.append(int(logits[0].argmax()))
        following.append(drafts[-1])
        h = torch.cat([h, normed if qwen else out])
    return drafts


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms(x, weight, eps)


@pytest.mark.parametrize("family", ["deepseek-v3", "glm4-moe", *QWEN])
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
    config = {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False}
    settings = {"load_format": "auto", "max_num_batched_tokens": 16, "max_num_seqs": 3}
    settings |= {"device": "cpu"} if family in QWEN else {}  # a GPU has no drafts beside recurrent layers
    loop, _ = build_core(tiny_config(**settings, speculative_config=config), resolve(str(tmp_path)))
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    asked = [GenerateRequest(id=str(n), tokens=list(range(3 + n, 3 + n + n * 9)), params=params) for n in (1, 2)]
    assert len(tokens_of(drive(loop, asked))) == 2
    assert len(proposed) > 5
    with torch.no_grad():
        for known, drafts in proposed:
            assert drafts == reference(short, long, own, known, len(drafts))
    loop.close()


def test_a_model_without_such_layers_is_refused() -> None:
    from toy_models import model_files

    with pytest.raises(ConfigError, match="num_nextn_predict_layers in its config"):
        build_core(tiny_config(speculative_config={"method": "mtp"}), model_files())
