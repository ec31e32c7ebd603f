"""Architecture name -> builder. Adding a family takes one line here (see docs/adding-a-model.md)."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from octavo.core.errors import ConfigError, ModelFileError
from octavo.models.decoder import CausalLM
from octavo.models.encoders.families import ENCODERS
from octavo.models.families.apertus import apertus
from octavo.models.families.arcee import afmoe, arcee
from octavo.models.families.cohere import cohere, cohere2, cohere2_moe
from octavo.models.families.deepseek import deepseek_v2, deepseek_v3, glm4_moe_lite, minicpm3, mistral4, youtu
from octavo.models.families.exaone import exaone3, exaone4, exaone_moe
from octavo.models.families.falcon import bloom, falcon
from octavo.models.families.gemma import gemma, gemma2, gemma3, vaultgemma
from octavo.models.families.gemma4 import gemma4, gemma4_unified
from octavo.models.families.glm import glm, glm4
from octavo.models.families.gpt import gpt2, gpt_neox, gptj, opt
from octavo.models.families.gpt_oss import gpt_oss
from octavo.models.families.granite import granite, granite_hybrid, granite_swa, hyperclova_x, minicpm
from octavo.models.families.hunyuan import hunyuan, hunyuan_moe, hy3
from octavo.models.families.lfm2 import lfm2, lfm2_moe, lfm3
from octavo.models.families.llama import (
    ernie,
    helium,
    internlm2,
    internlm3,
    iquest_coder,
    jais2,
    llama,
    seed_oss,
    smollm3,
)
from octavo.models.families.llama4 import llama4
from octavo.models.families.mamba import bamba, falcon_mamba, jamba, mamba, mamba2, nemotron_h
from octavo.models.families.minimax import minimax_m2
from octavo.models.families.mistral import ministral, ministral3, mistral
from octavo.models.families.moe import (
    dots1,
    ernie_moe,
    flex_olmo,
    flint,
    glm4_moe,
    granite_moe,
    granite_moe_shared,
    granite_moe_swa,
    mellum,
    mixtral,
    olmoe,
    phi_moe,
    qwen2_moe,
    qwen3_moe,
    qwen3_vl_moe,
    solar_open,
)
from octavo.models.families.nanochat import nanochat
from octavo.models.families.olmo import olmo, olmo2, olmo3
from octavo.models.families.phi import phi, phi3
from octavo.models.families.qwen import qwen1
from octavo.models.families.qwen2 import mimo, qwen2
from octavo.models.families.qwen3 import qwen3
from octavo.models.families.qwen3_next import qwen3_5, qwen3_5_moe, qwen3_next
from octavo.models.families.stablelm import nemotron, stablelm, starcoder2
from octavo.models.hf_config import CLASSIFIER, SCORE_TOKENS, Config, has_language_head, num_labels, value_or
from octavo.models.load.quantized.table import method_of
from octavo.models.spec import DecoderSpec
from octavo.models.text_half import text_half
from octavo.nn.build import AnyBackend, Build
from octavo.nn.quant.base import everywhere
from octavo.nn.quant.none import Unquantized
from octavo.nn.weights import Keep, fused
from octavo.parallel.mesh import ALONE, Mesh

ARCHITECTURES: Mapping[str, Callable[[Config], DecoderSpec]] = {
    "AfmoeForCausalLM": afmoe,
    "ApertusForCausalLM": apertus,
    "ArceeForCausalLM": arcee,
    "BambaForCausalLM": bamba,
    "BloomForCausalLM": bloom,
    "Cohere2ForCausalLM": cohere2,
    "Cohere2MoeForCausalLM": cohere2_moe,
    "CohereForCausalLM": cohere,
    "DeepseekV2ForCausalLM": deepseek_v2,
    "DeepseekV3ForCausalLM": deepseek_v3,
    "Dots1ForCausalLM": dots1,
    "Ernie4_5ForCausalLM": ernie,
    "Ernie4_5_MoeForCausalLM": ernie_moe,
    "Exaone4ForCausalLM": exaone4,
    "ExaoneForCausalLM": exaone3,
    "ExaoneMoEForCausalLM": exaone_moe,
    "ExaoneMoeForCausalLM": exaone_moe,
    "FalconForCausalLM": falcon,
    "FalconMambaForCausalLM": falcon_mamba,
    "FlexOlmoForCausalLM": flex_olmo,
    "FlintForCausalLM": flint,
    "GPT2LMHeadModel": gpt2,
    "GPTJForCausalLM": gptj,
    "GPTNeoXForCausalLM": gpt_neox,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "Gemma4ForCausalLM": gemma4,
    "Gemma4UnifiedForCausalLM": gemma4_unified,
    "GemmaForCausalLM": gemma,
    "Glm4ForCausalLM": glm4,
    "Glm4MoeForCausalLM": glm4_moe,
    "Glm4MoeLiteForCausalLM": glm4_moe_lite,
    "GlmForCausalLM": glm,
    "GptOssForCausalLM": gpt_oss,
    "GraniteForCausalLM": granite,
    "GraniteMoeForCausalLM": granite_moe,
    "GraniteMoeHybridForCausalLM": granite_hybrid,
    "GraniteMoeSWAForCausalLM": granite_moe_swa,
    "GraniteMoeSharedForCausalLM": granite_moe_shared,
    "GraniteSWAForCausalLM": granite_swa,
    "HYV3ForCausalLM": hy3,
    "HeliumForCausalLM": helium,
    "HunYuanDenseV1ForCausalLM": hunyuan,
    "HunYuanMoEV1ForCausalLM": hunyuan_moe,
    "HyperCLOVAXForCausalLM": hyperclova_x,
    "IQuestCoderForCausalLM": iquest_coder,
    "InternLM2ForCausalLM": internlm2,
    "InternLM3ForCausalLM": internlm3,
    "Jais2ForCausalLM": jais2,
    "JambaForCausalLM": jamba,
    "Lfm2ForCausalLM": lfm2,
    "Lfm2MoeForCausalLM": lfm2_moe,
    "Lfm3ForCausalLM": lfm3,
    "Llama4ForCausalLM": llama4,
    "LlamaForCausalLM": llama,
    "Mamba2ForCausalLM": mamba2,
    "MambaForCausalLM": mamba,
    "MellumForCausalLM": mellum,
    "MiMoForCausalLM": mimo,
    "MiniCPM3ForCausalLM": minicpm3,
    "MiniCPMForCausalLM": minicpm,
    "MiniMaxM2ForCausalLM": minimax_m2,
    "Ministral3ForCausalLM": ministral3,
    "MinistralForCausalLM": ministral,
    "Mistral4ForCausalLM": mistral4,
    "MistralForCausalLM": mistral,
    "MixtralForCausalLM": mixtral,
    "NanoChatForCausalLM": nanochat,
    "NemotronForCausalLM": nemotron,
    "NemotronHForCausalLM": nemotron_h,
    "OPTForCausalLM": opt,
    "Olmo2ForCausalLM": olmo2,
    "Olmo3ForCausalLM": olmo3,
    "OlmoForCausalLM": olmo,
    "OlmoeForCausalLM": olmoe,
    "Phi3ForCausalLM": phi3,
    "PhiForCausalLM": phi,
    "PhiMoEForCausalLM": phi_moe,
    "PhimoeForCausalLM": phi_moe,
    "QWenLMHeadModel": qwen1,
    "Qwen2ForCausalLM": qwen2,
    "Qwen2MoeForCausalLM": qwen2_moe,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "Qwen3NextForCausalLM": qwen3_next,
    "Qwen3_5ForCausalLM": qwen3_5,
    "Qwen3_5MoeForCausalLM": qwen3_5_moe,
    "SeedOssForCausalLM": seed_oss,
    "SmolLM3ForCausalLM": smollm3,
    "SolarOpenForCausalLM": solar_open,
    "StableLmForCausalLM": stablelm,
    "Starcoder2ForCausalLM": starcoder2,
    "VaultGemmaForCausalLM": vaultgemma,
    "YoutuForCausalLM": youtu,
}


TEXT_HALVES: Mapping[str, Callable[[Config], DecoderSpec]] = {"Qwen3VLMoeTextModel": qwen3_vl_moe}
"""Architectures of text halves that have no checkpoints of their own."""


WITH_IMAGES = (
    "AyaVisionForConditionalGeneration",
    "Cohere2VisionForConditionalGeneration",
    "Exaone4_5_ForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
    "Glm4vForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
    "InternVLChatModel",
    "InternVLForConditionalGeneration",
    "KimiK25ForConditionalGeneration",
    "KimiVLForConditionalGeneration",
    "Lfm2VlForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
)
WITH_AUDIO = (
    "AudioFlamingo3ForConditionalGeneration",
    "Qwen2AudioForConditionalGeneration",
    "Qwen3ASRForConditionalGeneration",
)
NESTED = (*WITH_IMAGES, *WITH_AUDIO)
"""Architectures whose text half is one of `ARCHITECTURES` or `TEXT_HALVES`."""


def is_own(config: Config) -> bool:
    """Return whether a checkpoint's architecture is one of these families."""
    names = config.get("architectures") or []
    return bool(names) and (names[0] in NESTED or _with_head(names[0]) in ARCHITECTURES)


def _with_head(name: str) -> str:
    """Return the architecture with a language-model head of a bare model's or a classifier's, or the name itself."""
    if name in ARCHITECTURES or has_language_head(name):
        return name
    family = name.removesuffix(CLASSIFIER).removesuffix("Model")
    families = dict.fromkeys((family, family.removesuffix("Text")))  # transformers' name of Gemma 3's text half
    heads = [one + head for one in families for head in ("ForCausalLM", "LMHeadModel")]
    return next((head for head in heads if head in ARCHITECTURES), heads[0])


def unknown(architecture: str) -> str:
    """Return the first sentences of an error for an architecture that is not one of these families."""
    known = sorted([*ARCHITECTURES, *NESTED, *ENCODERS])
    near = difflib.get_close_matches(_with_head(architecture), known, n=1, cutoff=0.0)[0]
    return (
        f"The model's architecture is {architecture}; the nearest that Octavo has is {near}. Octavo supports "
        f"{', '.join(known)}."
    )


def spec_of(config: Config) -> DecoderSpec:
    """Convert a checkpoint's configuration to the `DecoderSpec` of a model with a KV cache.

    Raises:
        ConfigError: the architecture or a feature of the configuration is not supported.
        ModelFileError: a field is missing.
    """
    spec = stated_spec(config)
    if spec.bidirectional:
        raise ConfigError(
            f"The model's config ({config['architectures'][0]}) says that tokens attend to later ones, too. Octavo "
            "serves such decoders by themselves only, for embeddings. Serve another model."
        )
    return spec


def stated_spec(config: Config) -> DecoderSpec:
    """Convert a checkpoint's configuration to a `DecoderSpec`, which may be bidirectional. Raises as `spec_of`."""
    names = config.get("architectures") or []
    if not names:
        raise ModelFileError(
            "The model's config has no 'architectures', so Octavo can't tell what kind of model it is. "
            "Get the config.json that belongs to the model."
        )
    if names[0] in NESTED:
        method_of(config)
        half = text_half(config, {**ARCHITECTURES, **TEXT_HALVES})
        own = TEXT_HALVES.get(half["architectures"][0])
        spec = spec_of(half) if own is None else own(half)
        return replace(spec, stored=replace(spec.stored, nested=True))
    name = _with_head(names[0])
    if name not in ARCHITECTURES:
        raise ConfigError(f"{unknown(names[0])} Serve a model of one of these.")
    method_of(config)
    spec = ARCHITECTURES[name](config)
    if not value_or(config, "is_causal", True):
        if any(spec.windows):
            raise ConfigError(
                "The model's config has is_causal=False and sliding windows; Octavo has one or the other."
            )
        spec = replace(spec, bidirectional=True)
    # Checkpoints of bare models and of classifiers have no language-model head.
    if name == names[0]:
        return spec
    head = "model.embed_tokens.weight" if spec.tied else "lm_head.weight"
    tokens = config.get(SCORE_TOKENS) if names[0].endswith(CLASSIFIER) else None
    scored = None if tokens is None else (head, tuple(tokens))
    return replace(spec, tied=True, num_labels=num_labels(config), score_tokens=scored)


def build_model(
    spec: DecoderSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention: AnyBackend,
    scheme: type[Unquantized] = Unquantized,
    keep: Keep = fused,
    mesh: Mesh = ALONE,
) -> CausalLM:
    """Build the model of a spec, without weights, which `models/load` loads."""
    schemes = everywhere(scheme, dtype, device, keep)
    return CausalLM(Build(dtype, device, attention, schemes, keep=keep, mesh=mesh), spec)
