"""Make the files in models/ with the methods' own tools, for tests/golden/test_quantizing_tools.py: checkpoints of a
tiny Llama, and the logits that the tool computes with them.

    pip install gptqmodel==7.7.0 llmcompressor==0.14.0.1 compressed-tensors==0.20.0 torchao==0.18.0 \\
        bitsandbytes==0.50.2 auto-round==0.16.1 transformers==5.23.0
    python tests/data/quantized/make_models.py [NAME ...]

AutoAWQ and HQQ need an environment of their own, with an older Transformers:

    pip install autoawq==0.2.9 hqq==0.2.8.post1 accelerate transformers==4.51.3 datasets==3.6.0
    python tests/data/quantized/make_models.py autoawq-gemm autoawq-gemv hqq-4 hqq-3 hqq-8

GPTQModel needs GPTQMODEL_CPU_WORKERS=2 on a machine with two cores. Each file has the checkpoint's tensors, the logits
[tokens, vocabulary] of `PROMPT` as "expected", and in its metadata the configuration and the tool's version.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent / "models"
PROMPT = [3, 14, 15, 9, 26, 53, 58, 9, 7, 9, 32, 38, 46, 26, 43, 38]
VOCABULARY, GROUP = 64, 32

Make = Callable[[Path, Path], Tensor]
"""(folder of the plain model, folder to write to) -> the tool's logits."""


def plain(folder: Path) -> None:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        initializer_range=0.15,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, "w0")).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "w0", "eos_token": "w1"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def samples() -> list[list[int]]:
    torch.manual_seed(1)
    return torch.randint(0, VOCABULARY, (16, 48)).tolist()


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([PROMPT])).logits[0].float()
    return logits


def gptqmodel(source: Path, folder: Path, **settings: Any) -> Tensor:
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    model = GPTQModel.load(str(source), QuantizeConfig(group_size=GROUP, **settings), device="cpu")
    examples = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in samples()]
    model.quantize(examples, batch_size=1)
    model.save(str(folder))
    return logits_of(GPTQModel.load(str(folder), device="cpu", backend=BACKEND.TORCH).model)


def llm_compressor(source: Path, folder: Path, scheme: str, *, calibrated: bool = False, again: bool = True) -> Tensor:
    """Return the logits of the checkpoint as Transformers loads it `again`, or else those before it is written."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier

    model = AutoModelForCausalLM.from_pretrained(source)
    kind = GPTQModifier if calibrated else QuantizationModifier
    if scheme.startswith("{"):
        rule: dict[str, Any] = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": json.loads(scheme)}}}
    else:
        rule = {"scheme": scheme, "targets": "Linear"}
    data: dict[str, Any] = {}
    if calibrated:
        rows = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in samples()]
        data = {"dataset": Dataset.from_list(rows), "num_calibration_samples": len(rows), "max_seq_length": 48}
    oneshot(model=model, recipe=kind(ignore=["lm_head"], **rule), **data)
    before = logits_of(model)
    model.save_pretrained(folder, save_compressed=True)
    return logits_of(AutoModelForCausalLM.from_pretrained(folder)) if again else before


def transformers(source: Path, folder: Path, config: Callable[[], Any]) -> Tensor:
    """Quantize with a tool that Transformers calls while it loads a model."""
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config(), device_map="cpu")
    model.save_pretrained(folder)
    return logits_of(AutoModelForCausalLM.from_pretrained(folder, device_map="cpu"))


def autoawq(source: Path, folder: Path, layout: str) -> Tensor:
    """Return the logits in the layout gemm, of the same numbers: AutoAWQ computes gemv on GPUs only."""
    from awq import AutoAWQForCausalLM
    from awq.modules.linear import gemm
    from transformers import AutoTokenizer

    def quantized(version: str) -> Any:
        model = AutoAWQForCausalLM.from_pretrained(str(source), device_map="cpu", torch_dtype=torch.float16)
        settings = {"zero_point": True, "q_group_size": GROUP, "w_bit": 4, "version": version}
        data = {"calib_data": samples(), "max_calib_samples": 16, "max_calib_seq_len": 48}
        model.quantize(AutoTokenizer.from_pretrained(source), settings, apply_clip=False, **data)
        return model

    gemm.TRITON_AVAILABLE = False  # its kernels run on GPUs only
    quantized(layout).save_quantized(str(folder))
    return logits_of(quantized("GEMM").model)


def hqq(source: Path, folder: Path, bits: int) -> Tensor:
    """Write as Transformers does, whose own call of HQQ insists on a GPU."""
    from hqq.core.quantize import BaseQuantizeConfig
    from hqq.models.hf.base import AutoHQQHFModel
    from transformers import HqqConfig

    model = AutoModelForCausalLM.from_pretrained(source, torch_dtype=torch.bfloat16)
    settings = BaseQuantizeConfig(nbits=bits, group_size=GROUP, axis=1)
    AutoHQQHFModel.quantize_model(model, settings, compute_dtype=torch.bfloat16, device="cpu")
    model.config.quantization_config = HqqConfig(nbits=bits, group_size=GROUP)
    model.save_pretrained(folder)
    return logits_of(model)


def torchao(kind: str) -> Any:
    from torchao import quantization as q
    from transformers import TorchAoConfig

    groups = q.PerGroup(GROUP)
    made = {
        "int4": lambda: q.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=groups),
        "int8": lambda: q.Int8WeightOnlyConfig(version=2),
        "float8": lambda: q.Float8WeightOnlyConfig(),
    }
    return TorchAoConfig(quant_type=made[kind]())


def bitsandbytes(**settings: Any) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(**settings)


def auto_round(source: Path, folder: Path, bits: int, layout: str) -> Tensor:
    from auto_round import AutoRound
    from transformers import AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source)
    data = [torch.tensor([ids]) for ids in samples()]
    rounding = AutoRound(
        model, AutoTokenizer.from_pretrained(source), bits=bits, group_size=GROUP, iters=0, dataset=data, seqlen=48
    )
    rounding.quantize_and_save(str(folder), format=layout)
    folder = next(folder.rglob("config.json")).parent
    return logits_of(AutoModelForCausalLM.from_pretrained(folder, device_map="cpu"))


ASYMMETRIC = json.dumps({"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": GROUP})
CHANNELS = json.dumps({"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"})
GROUPED = json.dumps({"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP})


def by_transformers(config: Callable[..., Any], *args: Any, **settings: Any) -> Make:
    return partial(transformers, config=partial(config, *args, **settings))


def by_llm_compressor(scheme: str, **settings: Any) -> tuple[str, Make]:
    return "llmcompressor", partial(llm_compressor, scheme=scheme, **settings)


NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
MADE: dict[str, tuple[str, Make]] = {
    "gptqmodel-4": ("gptqmodel", partial(gptqmodel, bits=4)),
    "gptqmodel-4-act-order": ("gptqmodel", partial(gptqmodel, bits=4, desc_act=True, act_group_aware=False)),
    "gptqmodel-4-asymmetric": ("gptqmodel", partial(gptqmodel, bits=4, sym=False, format="gptq_v2")),
    "gptqmodel-3": ("gptqmodel", partial(gptqmodel, bits=3)),
    "gptqmodel-8": ("gptqmodel", partial(gptqmodel, bits=8)),
    "llmcompressor-w4a16": by_llm_compressor(GROUPED, calibrated=True),
    "llmcompressor-w4a16-asymmetric": by_llm_compressor(ASYMMETRIC, calibrated=True, again=False),
    "llmcompressor-w8a16": by_llm_compressor(CHANNELS),
    "llmcompressor-w8a8": by_llm_compressor("W8A8"),
    "llmcompressor-fp8": by_llm_compressor("FP8_DYNAMIC"),
    "llmcompressor-nvfp4": by_llm_compressor("NVFP4A16"),
    **{f"torchao-{kind}": ("torchao", by_transformers(torchao, kind)) for kind in ("int4", "int8", "float8")},
    "bitsandbytes-8": ("bitsandbytes", by_transformers(bitsandbytes, load_in_8bit=True)),
    "bitsandbytes-nf4": ("bitsandbytes", by_transformers(bitsandbytes, **NF4)),
    "auto-round-4": ("auto-round", partial(auto_round, bits=4, layout="auto_round")),
    "auto-round-awq": ("auto-round", partial(auto_round, bits=4, layout="auto_awq")),
    **{f"autoawq-{layout}": ("autoawq", partial(autoawq, layout=layout)) for layout in ("gemm", "gemv")},
    **{f"hqq-{bits}": ("hqq", partial(hqq, bits=bits)) for bits in (3, 4, 8)},
}


def main() -> None:
    HERE.mkdir(exist_ok=True)
    for name in sys.argv[1:] or MADE:
        tool, make = MADE[name]
        with TemporaryDirectory() as folder:
            source, to = Path(folder, "plain"), Path(folder, "made")
            plain(source)
            expected = make(source, to)
            to = next(to.rglob("config.json")).parent  # some tools add a folder
            tensors = load_file(to / "model.safetensors")
            about = {"config": (to / "config.json").read_text(), "made_by": f"{tool} {version(tool)}"}
            save_file({**tensors, "expected": expected.contiguous()}, HERE / f"{name}.safetensors", about)
        print(f"{name}: {about['made_by']}, {(HERE / f'{name}.safetensors').stat().st_size} bytes", flush=True)


if __name__ == "__main__":
    main()
