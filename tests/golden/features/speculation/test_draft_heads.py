"""Drafts of heads in the published layouts are those of a slow reference, at every step of an engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from head_reference import Weights, draft
from safetensors.torch import save_file
from torch import Tensor
from toy_engine import drive, tiny_config, tokens_of
from toy_models import behind

from octavo.build import build_core
from octavo.core.errors import ConfigError, ModelFileError
from octavo.core.params import SamplingParams
from octavo.core.request import GenerateRequest
from octavo.features.speculation.engine import SpeculationEngine
from octavo.features.speculation.heads.drafter import HeadDrafter
from octavo.features.speculation.heads.layers import HeadLayers
from octavo.features.speculation.heads.medusa import MedusaDrafter
from octavo.features.speculation.heads.model import EagleModel
from octavo.hub.resolve import resolve
from octavo.models.native import NativeDecoder
from octavo.worker.drafts import Drafting, Drafts
from octavo.worker.hooks import WorkerHook

SIZE, HEADS, KV_HEADS, VOCAB, INNER, LAYERS, DRAFT_VOCAB = 64, 4, 2, 97, 48, 4, 40
TAPPED = [1, 2, 4]
AUX = "eagle_aux_hidden_state_layer_ids"
CONFIG: dict[str, Any] = {
    "hidden_size": SIZE,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}


def random_head(kind: str, folder: Path, **changes: Any) -> tuple[Path, Weights]:
    """A head with random weights in its published layout, and its tensors."""
    rng = torch.Generator().manual_seed(5)

    def made(*shape: int) -> Tensor:
        return 0.2 * torch.randn(*shape, generator=rng)

    dim, inputs = SIZE // HEADS, SIZE * (1 if kind == "eagle" else 2)
    at = "layers.0" if kind == "eagle" else "midlayer"
    weights = {
        f"{at}.self_attn.q_proj.weight": made(SIZE, inputs),
        f"{at}.self_attn.k_proj.weight": made(KV_HEADS * dim, inputs),
        f"{at}.self_attn.v_proj.weight": made(KV_HEADS * dim, inputs),
        f"{at}.self_attn.o_proj.weight": made(SIZE, SIZE),
        f"{at}.mlp.gate_proj.weight": made(INNER, SIZE),
        f"{at}.mlp.up_proj.weight": made(INNER, SIZE),
        f"{at}.mlp.down_proj.weight": made(SIZE, INNER),
        f"{at}.post_attention_layernorm.weight": 1 + made(SIZE),
    }
    own: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle"], "model_type": "llama", "num_hidden_layers": 1}
    if kind == "eagle":
        weights |= {"fc.weight": made(SIZE, 2 * SIZE), "fc.bias": made(SIZE)}
    else:
        ids = torch.randperm(VOCAB, generator=rng)[:DRAFT_VOCAB].sort().values
        reachable = torch.zeros(VOCAB, dtype=torch.bool)
        reachable[ids] = True
        weights |= {
            "fc.weight": made(SIZE, 3 * SIZE),
            f"{at}.input_layernorm.weight": 1 + made(SIZE),
            f"{at}.hidden_norm.weight": 1 + made(SIZE),
            "norm.weight": 1 + made(SIZE),
            "lm_head.weight": made(DRAFT_VOCAB, SIZE),
            "d2t": ids - torch.arange(DRAFT_VOCAB),
            "t2d": reachable,
        }
        own |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB}
        own |= {"eagle_config": {AUX: TAPPED}}
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | own | changes), encoding="utf-8")
    return folder, weights


Continuation = Callable[[list[int], int], list[int]]


def spied(
    monkeypatch: pytest.MonkeyPatch, drafter: type[WorkerHook], right: Continuation | None = None
) -> list[tuple[list[int], list[int]]]:
    """Return a list that gets what is known and what is drafted, each time that drafts are proposed.

    With `right`, what is proposed in their place begins with up to as many right tokens as there are drafts.
    """
    proposed: list[tuple[list[int], list[int]]] = []
    propose = drafter.propose

    def noting(self: WorkerHook, drafting: Drafting, payload: Any) -> Drafts | None:
        drafts = propose(self, drafting, payload)
        assert drafts is not None
        for row, slot in enumerate(drafting.slots.tolist()):
            known = drafting.tokens[slot, : int(drafting.length[slot])].tolist()
            proposed.append((known, drafts.tokens[row, : int(drafts.counts[row])].tolist()))
            if right is not None and (count := len(proposed) % (1 + int(drafts.counts[row]))):
                drafts.tokens[row, :count] = torch.tensor(right(known, count))
        return drafts

    monkeypatch.setattr(drafter, "propose", noting)
    return proposed


def greedy(model: transformers.LlamaForCausalLM) -> Continuation:
    """What the model writes after some tokens."""

    def following(known: list[int], count: int) -> list[int]:
        tokens = list(known)
        with torch.no_grad():
            while len(tokens) < len(known) + count:
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens[len(known) :]

    return following


@pytest.mark.parametrize("accepted", [False, True], ids=["rejected", "accepted"])
@pytest.mark.parametrize("backend", [None, "torch", pytest.param("behind", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_drafts_are_the_references(
    kind: str, backend: str | None, accepted: bool, target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after steps that accepted none, some or all drafts, and where slots are on the device."""
    folder, model = target
    head, weights = random_head(kind, tmp_path / "head")
    if kind == "eagle":
        weights["lm_head.weight"] = model.lm_head.weight.detach()
    proposed = spied(monkeypatch, HeadDrafter, greedy(model) if accepted else None)
    settings: dict[str, Any] = {"load_format": "auto", "max_num_batched_tokens": 16, "max_num_seqs": 3}
    if backend == "behind":
        pytest.importorskip("triton")
        from toy_graphs import recorded_graphs  # needs it, too

        recorded_graphs(monkeypatch)
        settings |= behind(monkeypatch)
    else:
        settings["attention_backend"] = backend
    own = {"method": kind, "model": str(head), "num_speculative_tokens": 3, "adaptive": False, "prompt_lookup_min": 0}
    loop, _ = build_core(tiny_config(**settings, speculative_config=own), resolve(str(folder)))
    proposed.clear()  # those of the warm-up
    params = SamplingParams(max_tokens=12 if accepted else 9, temperature=0, ignore_eos=True)
    asked = [
        GenerateRequest(id=str(n), tokens=list(range(3 + n, 3 + n + size)), params=params)
        for n, size in enumerate((1, 7, 25))
    ]
    found = tokens_of(drive(loop, asked))
    assert len(proposed) > (6 if accepted else 10)
    counts = {one.name: sum(one.values.values()) for one in loop.stats().features}
    assert counts["spec_decode_num_accepted_tokens"] > 8 or not accepted
    for known, drafts in proposed:
        assert drafts == reference(kind, model, weights, known, len(drafts))
    with torch.no_grad():
        for request in asked:
            tokens = request.tokens + found[request.id, 0]
            logits = model(torch.tensor([tokens])).logits[0]
            assert logits.argmax(-1)[len(request.tokens) - 1 : -1].tolist() == found[request.id, 0]
    loop.close()


@pytest.mark.parametrize(("kind", "backend"), [("eagle", None), ("eagle3", "torch")])
def test_drafts_after_steps_without_any_are_the_references(
    kind: str, backend: str | None, target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few tokens are followed by drafts; the head computes the tokens between them later, four at once."""
    folder, model = target
    head, weights = random_head(kind, tmp_path / "head")
    if kind == "eagle":
        weights["lm_head.weight"] = model.lm_head.weight.detach()
    monkeypatch.setattr("octavo.features.speculation.heads.drafter.MOST_WAITING", 4)
    monkeypatch.setattr(
        SpeculationEngine, "drafts", lambda _, request: 2 * ((request.num_output + request.pending) % 9 > 6)
    )
    proposed = spied(monkeypatch, HeadDrafter, greedy(model))
    settings = {"load_format": "auto", "max_num_batched_tokens": 16, "max_num_seqs": 3, "attention_backend": backend}
    own = {"method": kind, "model": str(head), "num_speculative_tokens": 3, "adaptive": False, "prompt_lookup_min": 0}
    loop, _ = build_core(tiny_config(**settings, speculative_config=own), resolve(str(folder)))
    proposed.clear()  # those of the warm-up
    params = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
    asked = [GenerateRequest(id=str(n), tokens=list(range(3, 3 + n)), params=params) for n in (1, 7, 25)]
    assert len(tokens_of(drive(loop, asked))) == 3
    assert 9 <= len(proposed) <= 30
    for known, drafts in proposed:
        assert drafts == reference(kind, model, weights, known, len(drafts))
    loop.close()


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_the_log_says_which_heads_run_in_torch(
    kind: str, target: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On a CPU, where the target is a native program."""
    head, _ = random_head(kind, tmp_path / "head")
    own = {"method": kind, "model": str(head), "num_speculative_tokens": 3}
    settings = {"load_format": "auto", "device": "cpu", "attention_backend": "native"}
    loop, _ = build_core(tiny_config(**settings, speculative_config=own), resolve(str(target[0])))
    loop.close()
    said = f"the companion model {head} runs layer by layer in torch"
    reasons = [line for line in caplog.messages if said in line]
    assert len(reasons) == (kind != "eagle")
    assert all(line.endswith("the kernels lack heads with method=eagle3") for line in reasons)


@pytest.mark.parametrize("backend", [None, "torch"])
def test_a_head_draws_its_own_tokens(
    backend: str | None, target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EAGLE's first form with a draft vocabulary; on a CPU it is a native program, as its target is."""
    folder, model = target
    head, weights = random_head("eagle", tmp_path / "head", draft_vocab_size=DRAFT_VOCAB)
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(7))[:DRAFT_VOCAB].sort().values
    weights["lm_head.weight"] = model.lm_head.weight.detach()[ids].contiguous()
    weights["d2t"] = ids - torch.arange(DRAFT_VOCAB)
    save_file(weights, head / "model.safetensors")
    kinds: list[type] = []
    attach = HeadDrafter.attach

    def noting(self: HeadDrafter, target: Any, site: Any) -> None:
        attach(self, target, site)
        kinds.append(type(self._companion.model))

    monkeypatch.setattr(HeadDrafter, "attach", noting)
    proposed = spied(monkeypatch, HeadDrafter, greedy(model))
    settings = {"load_format": "auto", "max_num_batched_tokens": 16, "max_num_seqs": 3, "attention_backend": backend}
    own = {
        "method": "eagle",
        "model": str(head),
        "num_speculative_tokens": 3,
        "adaptive": False,
        "prompt_lookup_min": 0,
    }
    loop, _ = build_core(tiny_config(**settings, speculative_config=own), resolve(str(folder)))
    proposed.clear()  # those of the warm-up
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    asked = [GenerateRequest(id=str(n), tokens=list(range(3 + n, 3 + 2 * n)), params=params) for n in (1, 7, 25)]
    assert len(tokens_of(drive(loop, asked))) == 3
    assert kinds == [NativeDecoder if backend is None and not torch.cuda.is_available() else EagleModel]
    assert len(proposed) > 9
    for known, drafts in proposed:
        assert drafts == reference("eagle", model, weights, known, len(drafts))
    loop.close()


def reference(
    kind: str,
    model: transformers.LlamaForCausalLM,
    weights: Weights,
    known: list[int],
    count: int,
    *,
    normed: bool = False,
    ranks: Sequence[int] = (),
) -> list[int]:
    """What the head drafts after these tokens; see `draft`."""
    with torch.no_grad():
        states = model(torch.tensor([known]), output_hidden_states=True).hidden_states
        if kind == "eagle":
            h = states[-1][0]  # after the norm, as transformers has it
        else:
            h = torch.cat([_before_layer(model, known, place) for place in TAPPED], -1)
        table = weights.get("embed_tokens.weight", model.model.embed_tokens.weight)
        return draft(kind, weights, known, h[:-1], count, HEADS, KV_HEADS, table, normed=normed, ranks=ranks)


def _before_layer(model: transformers.LlamaForCausalLM, tokens: list[int], place: int) -> Tensor:
    """The residual stream before a layer; after the last one, without the norm."""
    kept: list[Tensor] = []
    module = model.model.layers[place] if place < LAYERS else model.model.norm

    def keep(_: Any, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        kept.append((args or (kwargs["hidden_states"],))[0][0])

    hook = module.register_forward_pre_hook(keep, with_kwargs=True)
    model(torch.tensor([tokens]))
    hook.remove()
    return kept[0]


@pytest.mark.parametrize(
    "layout", ["{}.0.linear.{}|{}.1.weight", "medusa_heads.blocks.{}.layers.0.{}|lm_heads.{}.weight"]
)
def test_medusas_drafts_are_the_references(
    layout: str, target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Head i is lm_head(h + silu(W h + b)) of the last computed state (https://arxiv.org/abs/2401.10774, 2.1)."""
    folder, model = target
    rng = torch.Generator().manual_seed(8)
    block, out = layout.split("|")
    weights = {}
    for head in range(2):
        weights[block.format(head, "weight")] = 0.3 * torch.randn(SIZE, SIZE, generator=rng)
        weights[block.format(head, "bias")] = 0.3 * torch.randn(SIZE, generator=rng)
        weights[out.format(head)] = 0.3 * torch.randn(VOCAB, SIZE, generator=rng)
    path = tmp_path / "head"
    path.mkdir()
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1}))
    proposed = spied(monkeypatch, MedusaDrafter)
    settings: dict[str, Any] = {"load_format": "auto", "max_num_batched_tokens": 16, "max_num_seqs": 3}
    own = {"method": "medusa", "model": str(path), "num_speculative_tokens": 3, "adaptive": False}
    loop, _ = build_core(tiny_config(**settings, speculative_config=own), resolve(str(folder)))
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    asked = [GenerateRequest(id=str(n), tokens=list(range(3, 3 + n)), params=params) for n in (1, 7, 25)]
    assert len(tokens_of(drive(loop, asked))) == 3
    assert len(proposed) > 15
    with torch.no_grad():
        for known, drafts in proposed:
            h = model(torch.tensor([known]), output_hidden_states=True).hidden_states[-1][0, -2]
            for head, token in enumerate(drafts):
                inner = weights[block.format(head, "weight")] @ h + weights[block.format(head, "bias")]
                logits = weights[out.format(head)] @ (h + torch.nn.functional.silu(inner))
                assert token == int(logits.argmax())
    loop.close()


@pytest.mark.parametrize("backend", [None, "torch"])
@pytest.mark.parametrize(("kind", "tables"), [("eagle", ("embed_tokens", "lm_head")), ("eagle3", ("embed_tokens",))])
def test_a_head_has_tables_of_its_own(
    kind: str,
    tables: tuple[str, ...],
    backend: str | None,
    target: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head, weights = random_head(kind, tmp_path / "head")
    weights |= {f"{table}.weight": 0.4 * torch.randn(VOCAB, SIZE) for table in tables}
    save_file(weights, head / "model.safetensors")
    check_drafts(kind, head, weights, target, monkeypatch, attention_backend=backend)


@pytest.mark.parametrize(("kind", "at"), [("eagle", "layers.0"), ("eagle3", "midlayer")])
def test_a_head_has_biases(kind: str, at: str, target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of queries, keys and values, as those of Qwen2 do."""
    _, model = target
    head, weights = random_head(kind, tmp_path / "head")
    sizes = {"q": SIZE, "k": KV_HEADS * SIZE // HEADS, "v": KV_HEADS * SIZE // HEADS}
    weights |= {f"{at}.self_attn.{name}_proj.bias": torch.randn(size) for name, size in sizes.items()}
    save_file(weights, head / "model.safetensors")
    if kind == "eagle":
        weights["lm_head.weight"] = model.lm_head.weight.detach()
    check_drafts(kind, head, weights, target, monkeypatch)


def test_copies_of_the_tables_are_shared(target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, model = target
    head, weights = random_head("eagle", tmp_path / "head")
    tables = {"embed_tokens.weight": model.model.embed_tokens.weight, "lm_head.weight": model.lm_head.weight}
    save_file(weights | {name: table.detach().bfloat16() for name, table in tables.items()}, head / "model.safetensors")
    made = []
    build = HeadLayers.build
    monkeypatch.setattr(HeadLayers, "build", lambda *args: made.append(build(*args)) or made[0])
    settings = {"load_format": "auto", "attention_backend": "torch"}
    build_core(tiny_config(**settings, speculative_config=using("eagle", head)), resolve(str(folder)))[0].close()
    assert [(one.embedding, one.head) for one in made] == [(None, None)]


def check_drafts(
    kind: str,
    head: Path,
    weights: Weights,
    target: Any,
    monkeypatch: pytest.MonkeyPatch,
    *,
    normed: bool = False,
    **settings: Any,
) -> None:
    folder, model = target
    proposed = spied(monkeypatch, HeadDrafter)
    own = using(kind, head) | {"num_speculative_tokens": 3, "adaptive": False, "prompt_lookup_min": 0}
    config = tiny_config(**{"load_format": "auto", "speculative_config": own} | settings)
    loop, _ = build_core(config, resolve(str(folder)))
    proposed.clear()  # those of the warm-up
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    assert tokens_of(drive(loop, [GenerateRequest(id="0", tokens=list(range(3, 10)), params=params)]))
    assert proposed
    for known, drafts in proposed:
        assert drafts == reference(kind, model, weights, known, len(drafts), normed=normed)
    loop.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("normed", [True, False])
def test_a_residual_may_begin_after_the_norm(
    normed: bool, dtype: str, target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, weights = random_head("eagle3", tmp_path / "head", norm_before_residual=normed)
    check_drafts("eagle3", head, weights, target, monkeypatch, normed=normed, dtype=dtype, attention_backend="torch")


@pytest.mark.parametrize("changes", [{"norm_before_fc": True}, {"eagle_config": {AUX: TAPPED, "norm_before_fc": True}}])
def test_what_is_read_of_the_layers_may_be_normed(
    changes: dict[str, Any], target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, weights = random_head("eagle3", tmp_path / "head", **changes)
    weights["input_norm.weight"] = 1 + 0.5 * torch.randn(3 * SIZE)
    save_file(weights, head / "model.safetensors")
    check_drafts("eagle3", head, weights, target, monkeypatch, attention_backend="torch")


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_head_computes_in_the_dtype_of_its_model(
    kind: str, target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Published heads often state another one. The target's embedding and states have the target's."""
    _, model = target
    head, weights = random_head(kind, tmp_path / "head", torch_dtype="float16")
    if kind == "eagle":
        weights["lm_head.weight"] = model.lm_head.weight.detach()
    check_drafts(kind, head, weights, target, monkeypatch, dtype="auto", attention_backend="torch")


@pytest.mark.parametrize(
    ("kind", "changes", "error", "says"),
    [
        ("eagle", {"hidden_size": 32}, ConfigError, "for a model of hidden size 32, and the model has 64"),
        (
            "eagle",
            {"hidden_size": 32, "target_hidden_size": SIZE},
            ConfigError,
            "for a model of hidden size 32, and the model has 64",
        ),
        ("eagle3", {"draft_vocab_size": 41}, ModelFileError, r"lm_head\.weight .* has shape"),
        ("eagle3", {"draft_vocab_size": 98}, ConfigError, "draws from 98 tokens, and the model has 97"),
        ("eagle3", {"draft_vocab_size": "40"}, ModelFileError, "draft_vocab_size='40', which should be a positive"),
        ("eagle3", {"eagle_config": [1]}, ConfigError, r"reads layers \[2, 2, 1\] of a model with 4 layers"),
        ("eagle3", {"eagle_config": None, AUX: 2}, ConfigError, "reads layers 2 of .* must be a list of ascending"),
        ("eagle3", {"norm_before_residual": "yes"}, ModelFileError, "norm_before_residual='yes', which should be true"),
        ("eagle3", {"fc_norm": True}, ConfigError, "asks for fc_norm=True; Octavo supports False only"),
        ("eagle3", {"norm_output": True}, ConfigError, "asks for norm_output=True; Octavo supports False only"),
        ("eagle3", {"eagle_config": {AUX: ["1"]}}, ConfigError, r"reads layers \['1'\]"),
    ],
)
def test_a_head_of_another_model_is_refused(
    kind: str, changes: dict[str, Any], error: type[Exception], says: str, target: Any, tmp_path: Path
) -> None:
    folder, _ = target
    head, _ = random_head(kind, tmp_path / "head", **changes)
    with pytest.raises(error, match=says):
        build_core(tiny_config(load_format="auto", speculative_config=using(kind, head)), resolve(str(folder)))


def test_a_head_that_draws_other_tokens_is_refused(target: Any, tmp_path: Path) -> None:
    folder, _ = target
    head, weights = random_head("eagle3", tmp_path / "head")
    save_file(weights | {"d2t": torch.full((DRAFT_VOCAB,), 60)}, head / "model.safetensors")
    with pytest.raises(ConfigError, match="d2t of the head names tokens 60 to 99, and the model has 97"):
        build_core(tiny_config(load_format="auto", speculative_config=using("eagle3", head)), resolve(str(folder)))


def using(kind: str, head: Path) -> dict[str, Any]:
    return {"method": kind, "model": str(head)}
