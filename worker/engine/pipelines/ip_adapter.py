"""IP-Adapters: the cross-attention of a UNet also reads an image, with a scale per row.

Once it is loaded, every call of the UNet needs an image embedding: rows without one get zeros and scale zero, which
adds zeros to them.
"""

import importlib.util
import json
from typing import Any

import torch
from diffusers.models import embeddings
from transformers import CLIPImageProcessorPil

from shared.config.model_spec import ModelSpec
from worker.engine.fusion.module_proxy import ModuleProxy
from worker.engine.pipelines.clones import Pipeline
from worker.engine.weights.requirements import cached_folder

_SCALES = "ip_adapter_scales"  # one per row, on the host; a UNet ignores keys that it does not know


class RowScales:
    """The scales of the rows of the present forward, in place of the one number of each attention processor."""

    def __init__(self) -> None:
        self._values: torch.Tensor | None = None

    def __eq__(self, other: object) -> bool:
        """Return whether all are zero: the processors skip the image then."""
        return self._values is None

    __hash__ = None  # type: ignore[assignment]

    def __mul__(self, rows: torch.Tensor) -> torch.Tensor:
        values = self._values
        if values is None:
            return torch.zeros_like(rows)
        return (rows.float() * values).to(rows.dtype)

    def read(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Take the scales out of the arguments of the UNet's forward; the hook of all its forwards."""
        added = dict(kwargs["added_cond_kwargs"])
        scales: torch.Tensor = added.pop(_SCALES)
        sample = args[0] if args else kwargs["sample"]
        self._values = scales.view(-1, 1, 1).to(sample.device, non_blocking=True) if bool(scales.any()) else None
        return args, {**kwargs, "added_cond_kwargs": added}


class ImageAdapter:
    """The IP-Adapter of one model: the embedding of no image, and proxies of the UNet for a job's scale."""

    def __init__(self, unet: Any, image_encoder: Any) -> None:
        (projection,) = unet.encoder_hid_proj.image_projection_layers
        if isinstance(projection, embeddings.ImageProjection):
            self._empty: tuple[int, ...] = (1, projection.image_embeds.in_features)
        elif isinstance(projection, embeddings.IPAdapterPlusImageProjection):
            config = image_encoder.config
            tokens = (config.image_size // config.patch_size) ** 2 + 1
            self._empty = (1, tokens, projection.proj_in.in_features)
        else:
            raise ValueError(f"IP-Adapters with a {type(projection).__name__} are not supported")
        self._scales = RowScales()
        for processor in unet.attn_processors.values():
            if hasattr(processor, "to_k_ip"):
                processor.scale = [self._scales]
        unet.register_forward_pre_hook(self._scales.read, with_kwargs=True)
        self._unet = unet

    def stand_in(self, unet: Any, scale: float) -> ModuleProxy:
        """Return the stand-in for the UNet in the pipeline of a job with a scale, 0 for none; it calls `unet`."""
        return _ScaledProxy(unet, self._unet, scale, self._empty)


class _ScaledProxy(ModuleProxy):
    """Adds a job's scale to its calls of the UNet, and the embedding of no image where it has none."""

    def __init__(self, proxy: ModuleProxy, unet: torch.nn.Module, scale: float, empty: tuple[int, ...]) -> None:
        super().__init__(unet, {}, proxy.device, proxy.dtype)
        self._proxy = proxy
        self._scale = scale
        self._empty = empty
        # The same tensors at each step are joined once.
        self._added: dict[int, dict[str, Any]] = {}

    def __call__(self, sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        rows = sample.shape[0]
        if rows not in self._added:
            nothing = torch.zeros(rows, *self._empty, dtype=sample.dtype, device=sample.device)
            self._added[rows] = {"image_embeds": [nothing], _SCALES: torch.full((rows,), float(self._scale))}
        added = self._added[rows] | (kwargs.pop("added_cond_kwargs", None) or {})
        return self._proxy(sample, *args, added_cond_kwargs=added, **kwargs)


def load_ip_adapter(spec: ModelSpec, pipeline: Pipeline) -> ImageAdapter | None:
    """Load the IP-Adapter of a model into its UNet; None if it has none."""
    control = next((one for one in spec.control if one.kind == "ip_adapter"), None)
    if control is None:
        return None
    folder = cached_folder(control)
    if folder is None:
        raise ValueError(f"control {control.id!r}: no {control.weight_name} at {control.source}")
    if not hasattr(pipeline, "load_ip_adapter") or not hasattr(pipeline, "unet"):
        raise ValueError(f"control {control.id!r}: IP-Adapters are supported with UNets only")
    if pipeline.feature_extractor is None and importlib.util.find_spec("torchvision") is None:
        side = json.loads((folder / control.encoder_folder / "config.json").read_text())["image_size"]
        pipeline.register_modules(feature_extractor=CLIPImageProcessorPil(size=side, crop_size=side))
    pipeline.load_ip_adapter(
        str(folder),
        subfolder=control.subfolder,
        weight_name=control.weight_name,
        image_encoder_folder=control.image_encoder,
        local_files_only=True,
    )
    return ImageAdapter(pipeline.unet, pipeline.image_encoder)
