"""Tiny models of each kind with videos: a checkpoint on disk, and what Transformers makes of prompts with it.

Transformers resizes videos with torchvision only. Here, Pillow does it in its place, as in Octavo: their filters round
in other ways.
"""

from __future__ import annotations

import base64
import importlib
import importlib.machinery
import io
import itertools
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import image_kit
import numpy as np
import torch
import transformers
from image_kit import token
from media_kit import TEMPLATE
from numpy.typing import NDArray
from PIL import Image
from transformers import image_processing_backends, video_processing_utils

Frames = NDArray[np.uint8]
"""[frames, height, width, 3]."""


class _Interpolation(Enum):
    BILINEAR = 2
    BICUBIC = 3
    LANCZOS = 1


def _resize(video: torch.Tensor, size: tuple[int, int], interpolation: _Interpolation, **_: Any) -> torch.Tensor:
    pictures = video.flatten(0, -4).permute(0, 2, 3, 1).numpy()
    way = Image.Resampling(interpolation.value)
    made = np.stack([np.asarray(Image.fromarray(one).resize((size[1], size[0]), way)) for one in pictures])
    return torch.from_numpy(made).permute(0, 3, 1, 2).unflatten(0, video.shape[:-3])


def _normalize(video: torch.Tensor, mean: Any, std: Any, **_: Any) -> torch.Tensor:
    mean, std = (torch.as_tensor(one).view(-1, 1, 1) for one in (mean, std))
    return (video - mean) / std


def _module(name: str, **found: Any) -> ModuleType:
    made = ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    made.__dict__.update(found)
    return made


_FUNCTIONAL = _module(
    "torchvision.transforms.v2.functional",
    resize=_resize,
    normalize=_normalize,
    grayscale_to_rgb=lambda video: video,
    InterpolationMode=_Interpolation,
)
_MODULES = {
    "torchvision": _module("torchvision"),
    "torchvision.transforms": _module("torchvision.transforms"),
    "torchvision.transforms.v2": _module("torchvision.transforms.v2", functional=_FUNCTIONAL),
    "torchvision.transforms.v2.functional": _FUNCTIONAL,
}
_MODULES["torchvision"].transforms = _MODULES["torchvision.transforms"]  # type: ignore[attr-defined]
_MODULES["torchvision.transforms"].v2 = _MODULES["torchvision.transforms.v2"]  # type: ignore[attr-defined]


@contextmanager
def pillow_for_torchvision() -> Iterator[None]:
    filters = {Image.Resampling[one.name]: one for one in _Interpolation}
    before = {name: sys.modules.get(name) for name in _MODULES}
    with (
        patch.object(image_processing_backends, "tvF", _FUNCTIONAL, create=True),
        patch.object(image_processing_backends, "pil_torch_interpolation_mapping", filters),
        patch.object(image_processing_backends, "is_torchvision_greater_or_equal", lambda version: True),
        patch.object(video_processing_utils, "tvF", _FUNCTIONAL, create=True),
    ):
        sys.modules |= _MODULES
        try:
            yield
        finally:  # other modules that were imported stay
            for name, module in before.items():
                del sys.modules[name]
                if module is not None:
                    sys.modules[name] = module


def class_of(kind: str, what: str) -> Any:
    """Return a class of Transformers that says it needs torchvision."""
    prefix = {"processing": "Processor", "video_processing": "VideoProcessor"}[what]
    module, name = _PLACES[kind]
    with pillow_for_torchvision():
        return getattr(importlib.import_module(f"transformers.models.{module}.{what}_{module}"), name + prefix)


_PLACES = {
    "Qwen2VL": ("qwen2_vl", "Qwen2VL"),
    "Qwen2_5_VL": ("qwen2_5_vl", "Qwen2_5_VL"),
    "Qwen3VL": ("qwen3_vl", "Qwen3VL"),
    "LlavaOnevision": ("llava_onevision", "LlavaOnevision"),
    "SmolVLM": ("smolvlm", "SmolVLM"),
    "InternVL": ("internvl", "InternVL"),
}


@dataclass(frozen=True, eq=False)
class Case:
    """A kind of model that `image_kit` has.

    Attributes:
        processor: beginning of the names of its processor's class, and of its video processor's.
        place: what its template writes for a video.
        stated: fields of its video processor.
        extra: arguments of its processor.
    """

    processor: tuple[str, str]
    place: str
    stated: dict[str, Any]
    extra: dict[str, Any]


_PATCHES = {"patch_size": 7, "temporal_patch_size": 2, "merge_size": 2}
_PER_FRAME = {"size": {"shortest_edge": 14 * 14 * 4, "longest_edge": 14 * 14 * 20}}
_IN_ALL = {"size": {"shortest_edge": 14 * 14 * 8, "longest_edge": 14 * 14 * 60}, "fps": 2}
_CENTERED = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_QWEN = "<|vision_start|><|video_pad|><|vision_end|>"
_SMALL = {"size": {"height": 28, "width": 28}}
_TIMED = Case(("Qwen3VL", "Qwen3VL"), _QWEN, _PATCHES | _IN_ALL | _CENTERED, {})
CASES: Mapping[str, Case] = {
    "qwen2-vl": Case(("Qwen2VL", "Qwen2VL"), _QWEN, _PATCHES | _PER_FRAME, {}),
    "qwen2.5-vl": Case(("Qwen2_5_VL", "Qwen2VL"), _QWEN, _PATCHES | _PER_FRAME, {}),
    "qwen3-vl": _TIMED,
    "qwen3-vl-moe": _TIMED,
    "qwen3.5": _TIMED,
    "qwen3.5-moe": _TIMED,
    "llava-onevision": Case(
        ("LlavaOnevision", "LlavaOnevision"),
        "<video>",
        _SMALL,
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_2"},
    ),
    "smolvlm": Case(
        ("SmolVLM", "SmolVLM"),
        "<video>",
        {
            "size": {"longest_edge": 112},
            "max_image_size": {"longest_edge": 28},
            "video_sampling": {"fps": 1, "max_frames": 5, "video_size": {"longest_edge": 56}},
        },
        {"image_seq_len": 4},
    ),
    "internvl": Case(("InternVL", "InternVL"), "<video>", _SMALL, {"image_seq_length": 4}),
}


@dataclass(frozen=True, eq=False)
class Made:
    """A checkpoint on disk, and the same model and processor in Transformers."""

    folder: Path
    case: Case
    images: image_kit.Made
    processor: Any

    def prompt(self, text: str) -> str:
        return self.images.prompt(text.replace("VIDEO", self.case.place))

    def inputs(self, text: str, videos: list[Frames], fps: float, sampling: dict[str, Any]) -> Any:
        known = [{"total_num_frames": len(one), "fps": fps, "duration": len(one) / fps} for one in videos]
        with pillow_for_torchvision():
            return self.processor(
                text=[self.prompt(text)],
                videos=videos,
                video_metadata=known,
                do_sample_frames=True,
                return_tensors="pt",
                **{"fps": None, **sampling},
            )

    def generated(
        self, text: str, videos: list[Frames], fps: float, sampling: dict[str, Any], count: int
    ) -> tuple[list[int], list[int], torch.Tensor]:
        """The prompt's tokens, `count` greedy ones after them, and the first one's log-probabilities."""
        inputs = self.inputs(text, videos, fps, sampling)
        inputs = {name: one for name, one in inputs.items() if name not in ("video_metadata", "rows", "cols")}
        model = self.images.model
        with torch.no_grad():
            found = model.generate(**inputs, do_sample=False, max_new_tokens=count, min_new_tokens=count)
            logits = model(**inputs).logits[0, -1].float()
        size = inputs["input_ids"].shape[1]
        return inputs["input_ids"][0].tolist(), found[0, size:].tolist(), torch.log_softmax(logits, -1)


def make(name: str, folder: Path) -> Made:
    """Write a random checkpoint with tokenizer, template and preprocessors."""
    case = CASES[name]
    images = image_kit.make(name, folder)
    stated = json.loads((folder / "config.json").read_text())
    if name == "llava-onevision":
        stated["video_token_index"] = images.model.config.video_token_index = token("<video>")
        (folder / "config.json").write_text(json.dumps(stated))
    own = image_kit.tokenizer()
    if name == "smolvlm":  # whose tokenizer has no such token
        known = json.loads(own.to_str())
        known["added_tokens"] = [one for one in known["added_tokens"] if one["content"] != "<video>"]
        (folder / "tokenizer.json").write_text(json.dumps(known))
        own = type(own).from_file(str(folder / "tokenizer.json"))
    template = TEMPLATE.replace("IMAGE", images.case.place)
    if name != "smolvlm":
        template = template.replace("{% else %}{{ part.text }}", f"{_SHOWN}{case.place}{{% else %}}{{{{ part.text }}}}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    if "Qwen2" in case.processor[0]:
        model = images.model.model
        model.get_rope_index = lambda *args, **kwargs: positions_of(model.config, *args, **kwargs)
    return Made(folder, case, images, processor(name, case, images, own, folder))


_SHOWN = "{% elif part.type == 'video' %}"


def processor(name: str, case: Case, images: image_kit.Made, own: Any, folder: Path) -> Any:
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=own, pad_token="<unk>")
    if name == "internvl":
        names = {"start_image": "<img>", "end_image": "</img>", "context_image": "<IMG_CONTEXT>", "video": "<video>"}
        for part, text in names.items():
            setattr(fast, f"{part}_token", text)
            setattr(fast, f"{part}_token_id", token(text))
    with pillow_for_torchvision():
        videos = class_of(case.processor[1], "video_processing")(**case.stated)
        videos.save_pretrained(folder)
        theirs = class_of(case.processor[0], "processing")
        module = sys.modules[theirs.__module__]
        if hasattr(module, "num2words"):
            module.num2words = lambda number: WORDS[number]  # type: ignore[attr-defined]
        made = type(theirs.__name__, (theirs,), {"check_argument_for_proper_class": lambda *args: None})
        return made(images.case.images, fast, videos, **case.extra)


WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def positions_of(
    config: Any,
    input_ids: torch.Tensor,
    mm_token_type_ids: torch.Tensor,
    image_grid_thw: torch.Tensor | None = None,
    video_grid_thw: torch.Tensor | None = None,
    second_per_grid_ts: Any = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of Qwen2-VL and Qwen2.5-VL as their authors describe them: what follows a video begins after its
    largest position. Transformers' own function begins after rows and columns, which differs for long videos."""
    given = {1: image_grid_thw, 2: video_grid_thw}
    grids = {kind: iter(() if grid is None else grid) for kind, grid in given.items()}
    seconds = iter(second_per_grid_ts if second_per_grid_ts is not None else ())
    found: list[list[int]] = []
    for kind, group in itertools.groupby(mm_token_type_ids[0].tolist()):
        begin = max((max(one) for one in found), default=-1) + 1
        if kind == 0:
            found += [[begin + i] * 3 for i, _ in enumerate(group)]
            continue
        depth, rows, columns = (int(one) for one in next(grids[kind]))
        step = 1.0
        if kind == 2 and second_per_grid_ts is not None:
            step = float(torch.tensor(config.vision_config.tokens_per_second) * next(seconds))
        for time, row, column in itertools.product(range(depth), range(rows // 2), range(columns // 2)):
            found.append([begin + int(np.float32(time) * np.float32(step)), begin + row, begin + column])
    made = torch.tensor(found).T[:, None]
    return made, torch.tensor([[int(made.max()) + 1 - len(found)]])


def film(count: int, width: int, height: int, seed: int = 0) -> Frames:
    """Frames that differ, each as of `image_kit.picture`."""
    return np.stack([np.asarray(image_kit.picture(width, height, seed=31 * seed + i)) for i in range(count)])


def jpegs(frames: Frames) -> str:
    """A URL of frames as vLLM takes it."""
    return "data:video/jpeg;base64," + ",".join(base64.b64encode(_file(one, "JPEG")).decode() for one in frames)


def gif(frames: Frames, milliseconds: int = 500) -> bytes:
    pictures = [Image.fromarray(one) for one in frames]
    file = io.BytesIO()
    pictures[0].save(file, "GIF", save_all=True, append_images=pictures[1:], duration=milliseconds, loop=0)
    return file.getvalue()


def _file(frame: Frames, form: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(frame).save(file, form)
    return file.getvalue()


def mp4(frames: Frames, fps: int = 4, *, form: str = "mp4", codec: str = "libx264") -> bytes:
    """A file of video, by PyAV."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        stream = container.add_stream(codec, rate=fps)
        stream.height, stream.width, stream.pix_fmt = frames.shape[1], frames.shape[2], "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def data_url(data: bytes, kind: str = "video/mp4") -> str:
    return f"data:{kind};base64," + base64.b64encode(data).decode()
