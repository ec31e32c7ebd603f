"""Images become the numbers that Transformers' processors make of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from image_kit import cases, picture, token, tokenizer
from PIL import Image

from octavo.core.errors import ConfigError
from octavo.features.media.decode import converted
from octavo.features.media.preprocessing import check_fields, make_processor
from octavo.features.media.processors.base import Item, Processor, Run, TooOddError
from octavo.features.media.towers.tower import Pixels
from octavo.nn.build import Build
from octavo.nn.quant.base import everywhere
from octavo.nn.quant.none import Unquantized

CPU = torch.device("cpu")
BUILD = Build(torch.float32, CPU, None, everywhere(Unquantized, torch.float32, CPU))
SIZES = [(28, 28), (40, 31), (31, 40), (200, 60), (17, 90), (113, 112), (5, 9), (300, 299)]


class Words:
    """The part of a tokenizer that processors use."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(tokenizer().encode(text, add_special_tokens=add_special_tokens).ids)

    def token_text(self, number: int) -> str:
        return str(tokenizer().id_to_token(number))


def config_of(name: str) -> dict[str, Any]:
    case = cases()[name]
    made = getattr(transformers, f"{case.name}Config")(vision_config=case.vision, text_config=case.text, **case.whole)
    return dict(made.to_dict()) | {"architectures": [f"{case.name}ForConditionalGeneration"]}


def processor_of(name: str, images: Any = None, **more: Any) -> tuple[Processor, dict[str, Any]]:
    stated = dict((images or cases()[name].images).to_dict()) | more
    return make_processor(config_of(name), stated, Words), stated  # type: ignore[arg-type]


def items_of(processor: Processor, image: Image.Image, *, coarse: bool = False) -> list[Item]:
    pieces = processor.pieces(converted(image, 10**7, "image"), coarse=coarse)
    return [piece.item for piece in pieces if isinstance(piece, Run)]


def normalized(stated: dict[str, Any], item: Item, *, standard: bool = False) -> torch.Tensor:
    return Pixels(stated, BUILD, standard=standard)(torch.from_numpy(item.data.copy()))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["llava", "llava-siglip", "llava-next", "llava-onevision", "smolvlm"])
def test_the_same_pictures(name: str, size: tuple[int, int]) -> None:
    processor, stated = processor_of(name)
    image = picture(*size)
    theirs = cases()[name].images(images=[image], return_tensors="pt")["pixel_values"].flatten(0, -4)
    ours = torch.cat([normalized(stated, item) for item in items_of(processor, image)])
    torch.testing.assert_close(ours, theirs.float(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_the_same_square_pictures(size: tuple[int, int]) -> None:
    processor, stated = processor_of("gemma3")
    image = picture(*size)
    theirs = cases()["gemma3"].images(images=[image], return_tensors="pt")["pixel_values"]
    (item,) = items_of(processor, image)
    torch.testing.assert_close(normalized(stated, item, standard=True), theirs.float(), rtol=0, atol=1e-6)
    lines = Words().encode("\n\n", add_special_tokens=False)
    assert (item.count, processor.most) == (16, 16)
    assert processor.pieces(image, coarse=True)[0] == [token("<start_of_image>")]
    assert processor.around == (lines, [token("<end_of_image>"), *lines])
    assert processor.frame == ("\n\n", "<end_of_image>\n\n")


@pytest.mark.parametrize(
    ("stated", "found"),
    [
        ({"do_pan_and_scan": True}, "do_pan_and_scan=true, which adds crops"),
        ({"do_resize": False}, "do_resize=false"),
        ({"size": {"height": 28, "width": 28}}, "image_size=56"),
    ],
)
def test_square_pictures_that_are_refused(stated: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        processor_of("gemma3", **stated)


def test_squares_of_patches_for_each_token() -> None:
    config = config_of("gemma3") | {"mm_tokens_per_image": 9}
    with pytest.raises(ConfigError, match=r"mm_tokens_per_image=9.*image_size=56 and patch_size=7"):
        make_processor(config, dict(cases()["gemma3"].images.to_dict()), Words)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", SIZES)
def test_the_same_tiles_of_a_grid(size: tuple[int, int]) -> None:
    processor, stated = processor_of("internvl")
    image = picture(*size)
    theirs = cases()["internvl"].images(images=[image], return_tensors="pt", crop_to_patches=True)["pixel_values"]
    ours = torch.cat([normalized(stated, item) for item in items_of(processor, image)])
    torch.testing.assert_close(ours, theirs.float(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [(40, 31), (31, 40), (200, 60), (17, 90), (113, 112), (5, 9)])
@pytest.mark.parametrize("name", ["pixtral", "mistral3"])
def test_the_same_rows(name: str, size: tuple[int, int]) -> None:
    processor, stated = processor_of(name)
    image = picture(*size)
    edge = 14 if name == "mistral3" else 7
    theirs = cases()[name].images(images=[image], return_tensors="pt", patch_size=edge)["pixel_values"]
    (item, *_), pieces = items_of(processor, image), processor.pieces(image, coarse=False)
    torch.testing.assert_close(normalized(stated, item), theirs.float(), rtol=0, atol=1e-6)
    rows, columns = theirs.shape[2] // edge, theirs.shape[3] // edge
    assert item.count == rows * columns
    ends = [*[[token("[IMG_BREAK]")]] * (rows - 1), [token("[IMG_END]")]]
    assert [one for one in pieces if isinstance(one, list)] == ends


@pytest.mark.parametrize("size", [(40, 31), (31, 90)])
def test_llavas_own_processor_pads_to_a_square(size: tuple[int, int]) -> None:
    images = transformers.LlavaImageProcessorPil(
        do_pad=True, size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}
    )
    processor, stated = processor_of("llava", images)
    image = picture(*size)
    (item,) = items_of(processor, image)
    theirs = images(images=[image], return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(normalized(stated, item), theirs.float(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [(40, 31), (31, 40), (200, 60), (17, 90), (5, 9), (300, 299)])
def test_images_in_their_own_shape(size: tuple[int, int]) -> None:
    processor, stated = processor_of("qwen2-vl")
    image = picture(*size)
    (item,) = items_of(processor, image)
    theirs = cases()["qwen2-vl"].images(images=[image], return_tensors="pt")
    rows, columns = (2 * edge for edge in item.layout)
    assert theirs["image_grid_thw"].tolist() == [[1, rows, columns]]
    pixels = normalized(stated, item)[0].reshape(3, rows // 2, 2, 7, columns // 2, 2, 7).permute(1, 4, 2, 5, 0, 3, 6)
    frames = pixels.flatten(0, 3).unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1)
    torch.testing.assert_close(frames, theirs["pixel_values"].float(), rtol=0, atol=1e-6)


def test_transparency_becomes_white_and_other_modes_are_converted() -> None:
    processor, stated = processor_of("llava")
    shape = picture(40, 31)
    clear = shape.copy()
    clear.putalpha(Image.linear_gradient("L").resize(shape.size))
    palette = shape.quantize(16)
    palette.info["transparency"] = 3
    for image in (clear, palette, shape.convert("L"), shape.convert("CMYK"), shape.convert("LA")):
        theirs = cases()["llava"].images(images=[image], return_tensors="pt")["pixel_values"]
        (item,) = items_of(processor, image)
        torch.testing.assert_close(normalized(stated, item), theirs.float(), rtol=0, atol=1e-6)


def test_tiles_are_told_apart_by_row_and_column() -> None:
    processor, _ = processor_of("smolvlm")
    pieces = processor.pieces(picture(60, 30), coarse=False)
    tokens = [token for piece in pieces for token in (piece if isinstance(piece, list) else [-1] * piece.count)]
    text = tokenizer().decode([one for one in tokens if one >= 0], skip_special_tokens=False)
    mark, rows, columns = "<fake_token_around_image>", range(1, 3), range(1, 5)
    tiles = "\n".join("".join(f"{mark}<row_{row}_col_{column}>" for column in columns) for row in rows)
    assert text == f"{tiles}\n\n{mark}<global-img>{mark}"
    assert tokens.count(-1) == (8 + 1) * 4
    (whole,) = items_of(processor, picture(60, 30), coarse=True)
    assert whole.data.shape == (1, 28, 28, 3)


def test_low_detail_is_fewer_patches() -> None:
    processor, _ = processor_of("qwen2-vl", size={"shortest_edge": 784, "longest_edge": 4_000_000})
    image = picture(1500, 1200)
    (fine,), (coarse,) = items_of(processor, image), items_of(processor, image, coarse=True)
    assert coarse.count <= 512 * 512 // 14**2 < fine.count


def test_odd_shapes_are_refused() -> None:
    processor, _ = processor_of("qwen2-vl")
    with pytest.raises(TooOddError, match="at most 200 times"):
        processor.pieces(Image.new("RGB", (1000, 3)), coarse=False)
    processor, _ = processor_of("llava")
    with pytest.raises(TooOddError, match="would be resized to"):
        processor.pieces(Image.new("RGB", (90000, 3)), coarse=False)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("llava", {"crop_size": {"height": 14, "width": 14}}, "image_size=28"),
        ("llava", {"size": "big"}, "should be an object of pixels"),
        ("smolvlm", {"max_image_size": {"longest_edge": 14}}, "tiles of 14 pixels"),
        ("qwen2-vl", {"patch_size": 14}, "patch_size=14 and merge_size=2"),
        ("qwen2-vl", {"do_resize": False}, "do_resize=false"),
        ("qwen2-vl", {"max_pixels": "many"}, "should be a positive whole number"),
    ],
)
def test_what_is_not_supported_is_refused(name: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(Exception, match=says) as caught:
        processor_of(name, **changes)
    assert isinstance(caught.value, ConfigError) or type(caught.value).__name__ == "ModelFileError"


def test_fields_without_effect_are_refused() -> None:
    check_fields(config_of("qwen2-vl"), {"max_pixels": 1000})
    with pytest.raises(ConfigError, match=r"'max_pixels', which has no effect on this model. It takes crop_size"):
        check_fields(config_of("llava"), {"max_pixels": 1000})


def test_the_token_of_an_image() -> None:
    assert {name: processor_of(name)[0].token for name in ("llava", "smolvlm", "qwen2.5-vl")} == {
        "llava": token("<image>"),
        "smolvlm": token("<image>"),
        "qwen2.5-vl": token("<|image_pad|>"),
    }
