"""`EncoderWorker`: an encoder on one device, from its files to a `Runner`."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.config import DeviceConfig, ModelConfig
from octavo.core.errors import ConfigError
from octavo.device.base import Device
from octavo.device.select import select_device
from octavo.hub.files import ModelFiles
from octavo.hub.text_config import stored_dtype
from octavo.models.encoders.registry import build_encoder, encoder_spec
from octavo.models.load import open_checkpoint
from octavo.models.load.arranged import arranged
from octavo.models.load.checkpoint import Checkpoint
from octavo.models.load.renamed import with_bert_names, with_modern_norms
from octavo.models.load.weights import load_weights, wanted_bytes
from octavo.models.model import EncoderModel
from octavo.models.spec import DecoderSpec
from octavo.nn.attention.whole import WholeAttention
from octavo.nn.build import Build
from octavo.nn.quant.base import everywhere
from octavo.nn.quant.none import Unquantized
from octavo.nn.quant.onednn import OneDNN, packing_works
from octavo.worker.blocks import Blocks
from octavo.worker.encoder.slots import PromptSlots
from octavo.worker.hooks import Hooks, Site, WorkerHook
from octavo.worker.parts import NoReplay, NoSampler
from octavo.worker.runner import Runner


class EncoderWorker:
    """Built in steps: settings first, then the weights, then the runner. Sizes in bytes.

    Raises:
        ConfigError: device or dtype can't be used here, or the model needs something that Octavo lacks.
        ModelFileError: the weights don't match the configuration.
    """

    def __init__(self, config: ModelConfig, device: DeviceConfig, files: ModelFiles) -> None:
        self.device: Device = select_device(device.device)
        self.device.setup(device.threads, device.cpu_bind)
        if config.quantization is not None:
            raise ConfigError(
                f"--quantization {config.quantization} is for generative models; encoders compute with unquantized "
                "weights. Leave it out."
            )
        spec = encoder_spec(files.config)
        self.spec = spec.within(config.max_model_len) if isinstance(spec, DecoderSpec) else spec
        # A configuration without a dtype means float32.
        stored = stored_dtype(files.config) or "float32"
        self.dtype = self.device.pick_dtype(config.dtype, stored)
        self._config = config
        self._files = files
        self.weight_bytes = 0
        self.model: EncoderModel | None = None

    @property
    def weight_form(self) -> str:
        """Storage format of the weights, for display."""
        return str(self.dtype).removeprefix("torch.")

    def load(self) -> None:
        """Build the model and pull its weights."""
        checkpoint = self._open()
        model = build_encoder(
            self.spec,
            dtype=self.dtype,
            device=self.device.torch_device,
            scheme=self._scheme(),
            stored=checkpoint.names(),
        )
        self.device.check_fits(wanted_bytes(model), self._files.weight_bytes, None)
        self.weight_bytes = load_weights(model, checkpoint, unneeded=model.unneeded).nbytes
        self.model = model

    def _open(self) -> Checkpoint:
        stored = open_checkpoint(self._files, self._config.load_format, self._config.seed)
        if isinstance(self.spec, DecoderSpec):
            return arranged(stored, self.spec)
        return with_modern_norms(with_bert_names(stored))

    def _scheme(self) -> type[Unquantized]:
        packs = self.device.torch_device.type == "cpu" and packing_works(self.dtype)
        return OneDNN if packs else Unquantized

    def make_runner(self, hooks: Sequence[WorkerHook], *, num_slots: int, max_step_tokens: int) -> Runner:
        """Build a runner without KV cache, replay and sampler: an encoder keeps nothing and samples no tokens."""
        assert self.model is not None, "the weights must be loaded first"
        device = self.device.torch_device
        together = Hooks(hooks)
        build = Build(self.dtype, device, None, everywhere(self._scheme(), self.dtype, device))
        blocks = Blocks.none(self.device)
        site = Site(build, self._open, self.device, blocks)
        together.attach(self.model, site, num_slots, max_step_tokens)
        return Runner(
            self.model,
            WholeAttention(),
            self.device,
            blocks,
            PromptSlots(device),
            NoSampler(),
            NoReplay(),
            together,
        )
