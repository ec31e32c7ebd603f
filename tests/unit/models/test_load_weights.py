"""Pulling weights into a model: what is asked for, what is missing, what is left over."""

from __future__ import annotations

import gc
import logging
from collections.abc import Set
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from octavo.core.errors import ModelFileError
from octavo.hub.files import ModelFiles
from octavo.models.decoder import CausalLM
from octavo.models.load import open_checkpoint
from octavo.models.load.checkpoint import Index
from octavo.models.load.dummy import DummyCheckpoint
from octavo.models.load.safetensors import SafetensorsCheckpoint
from octavo.models.load.weights import LoadReport, load_weights, weight_layers
from octavo.models.registry import build_model, spec_of
from octavo.nn.attention.reference import ReferenceAttention
from octavo.nn.stream import Stream
from octavo.nn.weights import TensorSpec

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 64,
}


class Memory:
    """A checkpoint in a dict."""

    origin = "memory"

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> Set[str]:
        return self.tensors.keys()

    def has(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...] | None:
        return tuple(self.tensors[name].shape)

    def tensor(self, name: str, spec: TensorSpec, index: Index | None = None) -> Tensor:
        return self.tensors[name] if index is None else self.tensors[name][index]


def make_model(dtype: torch.dtype = torch.float32, **changes: object) -> CausalLM:
    config = {**CONFIG, **changes}
    return build_model(spec_of(config), dtype=dtype, device=torch.device("cpu"), attention=ReferenceAttention())


def make_tensors(**changes: object) -> dict[str, Tensor]:
    """All that the model wants, at random."""
    wants = [want for layer in weight_layers(make_model(**changes)) for want in layer.wanted() if not want.optional]
    generator = torch.Generator().manual_seed(3)
    return {want.name: torch.randn(want.spec.shape, generator=generator) for want in wants}


def hidden_after(model: CausalLM) -> Tensor:
    """Something that depends on the first layer's feed-forward weights."""
    torch.manual_seed(0)
    with torch.inference_mode():
        stream, layer = Stream(torch.randn(5, 32)), model.layers[0]
        layer.mlp.out.into(stream, layer.mlp(stream, layer.post_norm))
        return model.logits(stream.total())


def test_the_names_asked_for_are_those_of_hugging_face() -> None:
    names = set(make_tensors())
    assert "model.layers.1.self_attn.k_proj.bias" in names
    assert "model.layers.0.mlp.gate_proj.weight" in names
    assert "lm_head.weight" in names
    assert len(names) == 3 + 2 * (7 + 3 + 2)


def test_a_missing_tensor_is_named_with_its_layer_and_file() -> None:
    tensors = make_tensors()
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(
        ModelFileError, match=r"Layer model\.layers\.1\.self_attn .*model\.layers\.1\.self_attn\.k_proj\.weight.*memory"
    ):
        load_weights(make_model(), Memory(tensors))


def test_a_wrong_shape_gives_both_shapes() -> None:
    tensors = make_tensors()
    tensors["model.embed_tokens.weight"] = torch.zeros(39, 32)
    with pytest.raises(ModelFileError, match=r"embed_tokens.*memory.*\[39, 32\].*\[40, 32\]"):
        load_weights(make_model(), Memory(tensors))


def test_integers_are_no_weights() -> None:
    tensors = make_tensors()
    tensors["model.norm.weight"] = torch.ones(32, dtype=torch.int8)
    with pytest.raises(ModelFileError, match=r"model\.norm\.weight.*torch\.int8.*torch\.float32"):
        load_weights(make_model(), Memory(tensors))


def test_unread_tensors_are_reported_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    extra = {"model.layers.0.self_attn.q_norm.weight": torch.ones(8), "vision.patch.weight": torch.ones(2)}
    ignored = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    tensors = make_tensors()
    with caplog.at_level(logging.WARNING):
        report = load_weights(make_model(), Memory({**tensors, **extra, **ignored}))
    assert report.unread == tuple(sorted(extra))
    assert all(name in caplog.text for name in extra)
    assert "inv_freq" not in caplog.text


def test_a_tied_model_leaves_a_stored_head_alone(caplog: pytest.LogCaptureFixture) -> None:
    tensors = make_tensors(tie_word_embeddings=True)
    assert "lm_head.weight" not in tensors
    model = make_model(tie_word_embeddings=True)
    report = load_weights(model, Memory({**tensors, "lm_head.weight": torch.full((40, 32), torch.nan)}))
    assert report.unread == ()
    assert not caplog.records
    hidden = torch.randn(3, 32)
    expected = model.norm(hidden) @ tensors["model.embed_tokens.weight"].T
    torch.testing.assert_close(model.logits(hidden), expected)


@pytest.mark.parametrize(("share", "warns"), [(0.0, False), (0.01, False), (1.0, True)])
def test_a_stored_head_unlike_the_embeddings_is_told(
    share: float, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A copy may be rounded in another way; a model that was trained with a head of its own gives other answers."""
    tensors = make_tensors(tie_word_embeddings=True)
    table = tensors["model.embed_tokens.weight"]
    head = table + share * torch.randn(table.shape, generator=torch.Generator().manual_seed(8))
    load_weights(make_model(tie_word_embeddings=True), Memory({**tensors, "lm_head.weight": head}))
    assert ('--hf-overrides {"tie_word_embeddings": false}' in caplog.text) == warns
    assert bool(caplog.records) == warns


def test_weights_are_counted_in_their_final_form() -> None:
    model = make_model(torch.bfloat16)
    report = load_weights(model, Memory(make_tensors()))
    rope_table = 64 * 8 * 4
    assert report.nbytes == 2 * sum(t.numel() for t in make_tensors().values()) + rope_table


def test_the_number_of_threads_is_left_as_it_was() -> None:
    threads = torch.get_num_threads()
    load_weights(make_model(), Memory(make_tensors()))
    assert torch.get_num_threads() == threads
    with pytest.raises(ModelFileError):
        load_weights(make_model(), Memory({}))
    assert torch.get_num_threads() == threads


def save(path: Path, tensors: dict[str, Tensor]) -> Path:
    save_file(tensors, path)
    return path


def safetensors_files(folder: Path, *paths: Path) -> ModelFiles:
    return ModelFiles(name="m", path=folder, format="safetensors", weights=paths, config=CONFIG)


def test_no_mapping_of_the_file_outlives_loading(tmp_path: Path) -> None:
    """In the stored dtype, where keeping a view would be easiest."""
    path = save(tmp_path / "model.safetensors", make_tensors())
    model = make_model()
    load_weights(model, open_checkpoint(safetensors_files(tmp_path, path)))
    gc.collect()
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert torch.isfinite(hidden_after(model)).all()


def test_several_files_are_one_checkpoint(tmp_path: Path) -> None:
    tensors = make_tensors()
    half = len(tensors) // 2
    names = sorted(tensors)
    paths = [
        save(tmp_path / "a.safetensors", {n: tensors[n] for n in names[:half]}),
        save(tmp_path / "b.safetensors", {n: tensors[n] for n in names[half:]}),
    ]
    together, apart = make_model(), make_model()
    load_weights(together, Memory(tensors))
    load_weights(apart, open_checkpoint(safetensors_files(tmp_path, *paths)))
    assert torch.equal(hidden_after(together), hidden_after(apart))


def test_the_same_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    paths = [save(tmp_path / f"{n}.safetensors", {"x": torch.zeros(2)}) for n in "ab"]
    with pytest.raises(ModelFileError, match=r"Tensor x .*a\.safetensors.*b\.safetensors"):
        SafetensorsCheckpoint(paths)


def test_slices_of_a_stored_tensor(tmp_path: Path) -> None:
    whole = torch.arange(24.0).view(4, 6)
    checkpoint = SafetensorsCheckpoint([save(tmp_path / "m.safetensors", {"x": whole})])
    part = checkpoint.tensor("x", TensorSpec((4, 6), torch.float32), (slice(1, 3), slice(0, 5)))
    assert torch.equal(part, whole[1:3, 0:5])


@pytest.mark.parametrize("keep", [0, 4, 60, -10])
def test_a_truncated_file_is_named(keep: int, tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors", make_tensors())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelFileError, match=r"model\.safetensors is corrupt or incomplete"):
        open_checkpoint(safetensors_files(tmp_path, path))


def test_a_format_that_the_files_do_not_have_is_told_with_theirs(tmp_path: Path) -> None:
    files = safetensors_files(tmp_path, save(tmp_path / "model.safetensors", make_tensors()))
    with pytest.raises(ModelFileError, match="not stored as GGUF; use --load-format safetensors"):
        open_checkpoint(files, "gguf")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFileError, match="is a GGUF file, not safetensors; use --load-format gguf"):
        SafetensorsCheckpoint([tmp_path / "model.gguf"])


def test_a_file_that_is_something_else_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("<html>not found</html>" * 100)
    with pytest.raises(ModelFileError, match=r"model\.safetensors is corrupt"):
        open_checkpoint(safetensors_files(tmp_path, path))


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"gone\.safetensors doesn't exist"):
        open_checkpoint(safetensors_files(tmp_path, tmp_path / "gone.safetensors"))


def test_no_files_at_all(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="dummy"):
        open_checkpoint(safetensors_files(tmp_path))


def load_dummy(seed: int) -> tuple[CausalLM, LoadReport]:
    model = make_model()
    return model, load_weights(model, open_checkpoint(safetensors_files(Path()), "dummy", seed))


def test_dummy_weights_depend_on_the_seed_alone() -> None:
    one, report = load_dummy(7)
    again, other = load_dummy(7)[0], load_dummy(8)[0]
    assert report.unread == ()
    assert torch.equal(hidden_after(one), hidden_after(again))
    assert not torch.allclose(hidden_after(one), hidden_after(other))


def test_dummy_values_have_a_sensible_scale() -> None:
    checkpoint = DummyCheckpoint(0)
    matrix = checkpoint.tensor("a.weight", TensorSpec((3000, 1000), torch.bfloat16)).float()
    assert matrix.std() == pytest.approx(1000**-0.5, rel=0.02)
    assert matrix.mean().abs() < 1e-3
    assert checkpoint.tensor("n.weight", TensorSpec((1000,), torch.float32)).mean() == pytest.approx(1.0, abs=0.01)
    assert checkpoint.tensor("p.bias", TensorSpec((1000,), torch.float32)).mean() == pytest.approx(0.0, abs=0.01)


def test_dummy_rows_and_tensors_differ() -> None:
    checkpoint = DummyCheckpoint(0)
    spec = TensorSpec((4096, 512), torch.float32)
    first, second = checkpoint.tensor("a.weight", spec), checkpoint.tensor("b.weight", spec)
    assert not torch.equal(first, second)
    assert len(torch.unique(first[:, :4], dim=0)) == 4096
    assert torch.equal(checkpoint.tensor("a.weight", spec, (slice(5, 9),)), first[5:9])
