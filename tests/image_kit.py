"""Tiny random checkpoints of models with images, their processors, and what Transformers makes of prompts with them."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import toy_tokenizers
import transformers
from media_kit import TEMPLATE, TEXT, greedy, logits, save_tokenizer, saved
from PIL import Image

_TEXT = {"vocab_size": 560, **TEXT}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 7,
    "image_size": 28,
    "initializer_range": 0.15,
}
MARKS = [
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<img>",
    "</img>",
    "<IMG_CONTEXT>",
    "[IMG]",
    "[IMG_BREAK]",
    "[IMG_END]",
    "<start_of_image>",
    "<end_of_image>",
    "<image_soft_token>",
    "<video>",
]

__all__ = ["MARKS", "TEMPLATE", "Case", "Made", "cases", "data_url", "make", "picture", "token", "tokenizer"]


def tokenizer() -> Any:
    """Of 3 to 500 or so tokens, with those of all kinds of models."""
    made = toy_tokenizers.byte_level()
    made.add_special_tokens(MARKS)
    return made


def token(text: str) -> int:
    return int(tokenizer().token_to_id(text))


@dataclass(frozen=True, eq=False)
class Case:
    """A kind of model.

    Attributes:
        name: beginning of the classes' names.
        place: what its template writes for an image.
    """

    name: str
    place: str
    vision: dict[str, Any]
    text: dict[str, Any]
    whole: dict[str, Any]
    images: Any
    wrap: Any


def _llava(images: Any, own: Any, **more: Any) -> Any:
    return transformers.LlavaProcessor(images, own, patch_size=7, vision_feature_select_strategy="default", **more)


def _llava_of_siglip(images: Any, own: Any) -> Any:
    return transformers.LlavaProcessor(images, own, patch_size=7, vision_feature_select_strategy="full")


def _idefics(images: Any, own: Any) -> Any:
    return transformers.Idefics3Processor(images, own, image_seq_len=4)


class _Pixtral:
    """So does Pixtral's."""

    def __init__(self, images: Any, own: Any, merge: int) -> None:
        self._images, self._own, self._edge = images, own, 7 * merge

    def __call__(self, text: str, images: list[Image.Image], return_tensors: str) -> Any:
        found = self._images(images=images, return_tensors="pt", patch_size=self._edge)
        for size in found["image_sizes"]:
            rows, columns = (int(edge) // self._edge for edge in size)
            text = text.replace("[IMG]", "[IMG_BREAK]".join(["<none>" * columns] * rows) + "[IMG_END]", 1)
        tokens = self._own(text.replace("<none>", "[IMG]"), return_tensors="pt")
        return {**tokens, "pixel_values": found["pixel_values"], "image_sizes": found["image_sizes"]}


def _pixtral(merge: int) -> Any:
    return lambda images, own: _Pixtral(images, own, merge)


class _Qwen:
    """Qwen2-VL's processor needs torchvision, for videos; this is its part for images."""

    def __init__(self, images: Any, own: Any) -> None:
        self._images, self._own = images, own

    def __call__(self, text: str, images: list[Image.Image], return_tensors: str) -> Any:
        found = self._images(images=images, return_tensors="pt")
        for grid in found["image_grid_thw"]:
            text = text.replace("<|image_pad|>", "<|none|>" * (int(grid.prod()) // 4), 1)
        text = text.replace("<|none|>", "<|image_pad|>")
        tokens = self._own(text, return_tensors="pt")
        marks = (tokens["input_ids"] == token("<|image_pad|>")).long()
        return {**tokens, **found, "mm_token_type_ids": marks}


class _Intern:
    """InternVL's processor needs torchvision, too."""

    def __init__(self, images: Any, own: Any) -> None:
        self._images, self._own = images, own

    def __call__(self, text: str, images: list[Image.Image], return_tensors: str) -> Any:
        found = self._images(images=images, return_tensors="pt", crop_to_patches=True)
        for count in found["num_patches"]:
            text = text.replace("<IMG_CONTEXT>", "<img>" + "<none>" * (4 * int(count)) + "</img>", 1)
        tokens = self._own(text.replace("<none>", "<IMG_CONTEXT>"), return_tensors="pt")
        return {**tokens, "pixel_values": found["pixel_values"]}


class _Onevision:
    """And LLaVA-OneVision's."""

    def __init__(self, images: Any, own: Any) -> None:
        self._images, self._own = images, own

    def __call__(self, text: str, images: list[Image.Image], return_tensors: str) -> Any:
        from transformers.models.llava_onevision import processing_llava_onevision as processing

        theirs = processing.LlavaOnevisionProcessor
        own: Any = SimpleNamespace(
            num_image_tokens=16, vision_aspect_ratio="anyres_max_2", image_processor=self._images
        )
        own._get_unpadded_features = MethodType(theirs._get_unpadded_features, own)
        found = self._images(images=images, return_tensors="pt")
        for size in found["image_sizes"].tolist():
            text = text.replace("<image>", "<none>" * theirs._get_number_of_features(own, *size, 28, 28), 1)
        return {**self._own(text.replace("<none>", "<image>"), return_tensors="pt"), **found}


def _gemma(images: Any, own: Any) -> Any:
    names = {"boi": "<start_of_image>", "eoi": "<end_of_image>", "image": "<image_soft_token>"}
    for name, text in names.items():
        setattr(own, f"{name}_token", text)
        setattr(own, f"{name}_token_id", token(text))
    return transformers.Gemma3Processor(images, own, image_seq_length=16)


_CLIP = {"model_type": "clip_vision_model", **_VISION}
_SIGLIP = {"model_type": "siglip_vision_model", **_VISION}
_LLAMA = {"model_type": "llama"}
_AXES = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 3, 3]}
_QWEN = {
    "initializer_range": 0.15,
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 7,
    "hidden_act": "silu",
}
_SIZES = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]
_MANY_SIZES = [[28 * rows, 28 * columns] for rows in range(1, 4) for columns in range(1, 4)]
_SQUARE = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}


def _qwen_tokens() -> dict[str, Any]:
    names = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
    around = {f"vision_{side}_token_id": token(f"<|vision_{side}|>") for side in ("start", "end")}
    return around | {f"{kind}_token_id": token(text) for kind, text in names.items()}


def _tiles() -> Any:
    return transformers.Idefics3ImageProcessorPil(size={"longest_edge": 112}, max_image_size={"longest_edge": 28})


def _in_own_shape(**more: Any) -> Any:
    size = {"shortest_edge": 14 * 14 * 4, "longest_edge": 14 * 14 * 40}
    return transformers.Qwen2VLImageProcessorPil(size=size, patch_size=7, **more)


def cases() -> dict[str, Case]:
    image = {"image_token_index": token("<image>"), "image_token_id": token("<image>")}
    idefics = {"image_token_id": token("<image>"), "scale_factor": 2, "pad_token_id": 0}
    pixtral = {"image_token_index": token("[IMG]"), "image_token_id": token("[IMG]")}
    qwen = "<|vision_start|><|image_pad|><|vision_end|>"
    qwen2 = {
        "initializer_range": 0.15,
        "depth": 2,
        "embed_dim": 32,
        "mlp_ratio": 2,
        "num_heads": 2,
        "patch_size": 7,
        "hidden_size": 64,
    }
    qwen3 = {
        **_QWEN,
        "depth": 3,
        "out_hidden_size": 64,
        "num_position_embeddings": 36,
        "hidden_act": "gelu_pytorch_tanh",
    }
    alternating = {**_AXES, "mrope_section": [3, 3, 2], "mrope_interleaved": True}
    half = {"partial_rotary_factor": 0.5}
    delta = {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    centered = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    plain = transformers.SiglipImageProcessorPil(size={"height": 28, "width": 28}, resample=3)
    return {
        "llava": Case(
            "Llava",
            "<image>",
            _CLIP,
            _LLAMA,
            {**image, "vision_feature_layer": -2},
            transformers.CLIPImageProcessorPil(**_SQUARE),
            lambda images, own: _llava(images, own, num_additional_image_tokens=1),
        ),
        "llava-siglip": Case(
            "Llava",
            "<image>",
            _SIGLIP,
            {"model_type": "qwen2"},
            {**image, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
            plain,
            _llava_of_siglip,
        ),
        "llava-next": Case(
            "LlavaNext",
            "<image>",
            _CLIP,
            {"model_type": "mistral", "sliding_window": None},
            {**image, "vision_feature_layer": -2, "image_grid_pinpoints": _SIZES},
            transformers.LlavaNextImageProcessorPil(**_SQUARE, image_grid_pinpoints=_SIZES),
            lambda images, own: transformers.LlavaNextProcessor(
                images, own, patch_size=7, vision_feature_select_strategy="default", num_additional_image_tokens=1
            ),
        ),
        "llava-onevision": Case(
            "LlavaOnevision",
            "<image>",
            _SIGLIP,
            {"model_type": "qwen2"},
            {**image, "image_grid_pinpoints": _MANY_SIZES, "vision_aspect_ratio": "anyres_max_2"},
            transformers.LlavaOnevisionImageProcessorPil(
                size={"height": 28, "width": 28}, image_grid_pinpoints=_MANY_SIZES
            ),
            _Onevision,
        ),
        "gemma3": Case(
            "Gemma3",
            "<start_of_image>",
            {**_SIGLIP, "image_size": 56},
            {
                "model_type": "gemma3_text",
                "head_dim": 32,
                "num_hidden_layers": 3,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "sliding_window": 5,
                "query_pre_attn_scalar": 32,
                "attn_logit_softcapping": None,
                "final_logit_softcapping": None,
            },
            {
                "mm_tokens_per_image": 16,
                "image_token_index": token("<image_soft_token>"),
                "boi_token_index": token("<start_of_image>"),
                "eoi_token_index": token("<end_of_image>"),
                "tie_word_embeddings": True,
            },
            transformers.Gemma3ImageProcessorPil(size={"height": 56, "width": 56}),
            _gemma,
        ),
        "idefics3": Case("Idefics3", "<image>", _VISION, _LLAMA, idefics, _tiles(), _idefics),
        "smolvlm": Case("SmolVLM", "<image>", _VISION, _LLAMA, idefics, _tiles(), _idefics),
        "internvl": Case(
            "InternVL",
            "<IMG_CONTEXT>",
            {**_VISION, "patch_size": [7, 7], "image_size": [28, 28], "layer_scale_init_value": 0.7},
            {"model_type": "qwen2"},
            {"image_token_id": token("<IMG_CONTEXT>"), "image_seq_length": 4, "tie_word_embeddings": False},
            transformers.GotOcr2ImageProcessorPil(size={"height": 28, "width": 28}, max_patches=6),
            _Intern,
        ),
        "internvl-norms": Case(
            "InternVL",
            "<IMG_CONTEXT>",
            {**_VISION, "patch_size": [7, 7], "image_size": [28, 28], "norm_type": "rms_norm", "use_qk_norm": True},
            {"model_type": "llama"},
            {"image_token_id": token("<IMG_CONTEXT>"), "image_seq_length": 4, "tie_word_embeddings": True},
            transformers.GotOcr2ImageProcessorPil(size={"height": 28, "width": 28}, max_patches=6),
            _Intern,
        ),
        "pixtral": Case(
            "Llava",
            "[IMG]",
            {"model_type": "pixtral", **_VISION},
            {"model_type": "mistral", "sliding_window": None},
            {**pixtral, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
            transformers.PixtralImageProcessorPil(size={"longest_edge": 56}),
            _pixtral(1),
        ),
        "mistral3": Case(
            "Mistral3",
            "[IMG]",
            {"model_type": "pixtral", **_VISION},
            {"model_type": "mistral", "sliding_window": None, "head_dim": 16},
            {**pixtral, "spatial_merge_size": 2, "tie_word_embeddings": False},
            transformers.PixtralImageProcessorPil(size={"longest_edge": 84}),
            _pixtral(2),
        ),
        "qwen2-vl": Case("Qwen2VL", qwen, qwen2, {"rope_parameters": _AXES}, _qwen_tokens(), _in_own_shape(), _Qwen),
        "qwen2.5-vl": Case(
            "Qwen2_5_VL",
            qwen,
            {**_QWEN, "out_hidden_size": 64, "fullatt_block_indexes": [1], "window_size": 28},
            {"rope_parameters": _AXES},
            {**_qwen_tokens(), "tie_word_embeddings": True},
            _in_own_shape(),
            _Qwen,
        ),
        "qwen3-vl": Case(
            "Qwen3VL",
            qwen,
            {**qwen3, "deepstack_visual_indexes": [0, 2]},
            {"num_hidden_layers": 3, "head_dim": 16, "rope_parameters": alternating},
            {**_qwen_tokens(), "tie_word_embeddings": True},
            _in_own_shape(**centered),
            _Qwen,
        ),
        "qwen3-vl-moe": Case(
            "Qwen3VLMoe",
            qwen,
            {**qwen3, "deepstack_visual_indexes": [0, 2]},  # as many as layers
            {"head_dim": 16, "rope_parameters": alternating, "moe_intermediate_size": 24, **experts},
            {**_qwen_tokens(), "tie_word_embeddings": False},
            _in_own_shape(**centered),
            _Qwen,
        ),
        "qwen3.5": Case(
            "Qwen3_5",
            qwen,
            qwen3,
            {"num_hidden_layers": 3, "head_dim": 32, "rope_parameters": {**alternating, **half}, **delta},
            {**_qwen_tokens(), "tie_word_embeddings": False},
            _in_own_shape(**centered),
            _Qwen,
        ),
        "qwen3.5-moe": Case(
            "Qwen3_5Moe",
            qwen,
            qwen3,
            {
                "head_dim": 32,
                "rope_parameters": {**alternating, **half},
                "moe_intermediate_size": 24,
                "shared_expert_intermediate_size": 40,
                **experts,
                **delta,
                "layer_types": ["linear_attention", "full_attention"],
            },
            {**_qwen_tokens(), "tie_word_embeddings": False},
            _in_own_shape(**centered),
            _Qwen,
        ),
    }


@dataclass(frozen=True, eq=False)
class Made:
    """A checkpoint on disk, and the same model and processor in Transformers."""

    folder: Path
    case: Case
    model: Any
    processor: Any

    def prompt(self, text: str) -> str:
        return text.replace("IMAGE", self.case.place)

    def generated(self, text: str, images: list[Image.Image], count: int) -> tuple[list[int], list[int]]:
        """The prompt's tokens, and `count` greedy ones after them."""
        inputs = self.processor(text=self.prompt(text), images=images, return_tensors="pt")
        return greedy(self.model, inputs, count)

    def logits(self, text: str, images: list[Image.Image]) -> torch.Tensor:
        """Of the token after the prompt."""
        return logits(self.model, self.processor(text=self.prompt(text), images=images, return_tensors="pt"))


def make(name: str, folder: Path, seed: int = 7) -> Made:
    """Write a random checkpoint with tokenizer, template and preprocessor."""
    case = cases()[name]
    halves = {"vision_config": case.vision, "text_config": {**_TEXT, **case.text}, **case.whole}
    model = saved(case.name, halves, folder, seed)
    own = tokenizer()
    save_tokenizer(own, folder, "image", case.place)
    case.images.save_pretrained(folder)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=own, pad_token="<unk>")
    return Made(folder, case, model, case.wrap(case.images, fast))


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth colors and some noise, so that filters of resizing differ."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    waves = [127 + 100 * np.sin(x / (3 + i + seed) + y / (5 + 2 * i)) for i in range(3)]
    noisy = np.stack(waves, axis=2) + rng.normal(0, 15, (height, width, 3))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def data_url(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
