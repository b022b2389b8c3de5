"""Quantized weights: a model's table as the configurations of diffusers and transformers."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from shared.config.model_spec import ModelSpec
from shared.config.weight_formats import WeightFormat, key_of
from worker.engine.weights.requirements import lacking

LIBRARIES: Mapping[str, Any] = {"diffusers": diffusers, "transformers": transformers}


def quantized_parts(spec: ModelSpec, folder: Path, index: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that quantize a model; raises `ValueError` if something is lacking.

    `index` is the model_index.json of `folder`.
    """
    quantization = spec.quantization
    if quantization is None:
        return {}
    if (fault := lacking(quantization, device.type)) is not None:
        raise ValueError(fault)
    dtype: torch.dtype = getattr(torch, spec.dtype)
    classes = {name: entry for name, entry in index.items() if isinstance(entry, list) and entry[0] in LIBRARIES}
    for key in quantization.formats:
        if key not in map(key_of, classes):
            raise ValueError(f"it has no component for quantization.{key}; remove the key")
    parts = {name: _from_gguf(name, file, folder, classes, dtype) for name, file in quantization.gguf.items()}
    configs = {
        name: config_for(weight_format, library, dtype)
        for name, (library, _) in classes.items()
        if (weight_format := quantization.format_of(name)) is not None
    }
    if configs:
        parts["quantization_config"] = diffusers.PipelineQuantizationConfig(quant_mapping=configs)
    return parts


def config_for(weight_format: WeightFormat, library: str, dtype: torch.dtype) -> Any:
    """Return the configuration of a format for a component of `library`."""
    package: Any = LIBRARIES[library]
    if weight_format == "bitsandbytes-nf4":
        return package.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    if weight_format == "bitsandbytes-int8":
        # Above a threshold, columns with an outlier in any row are multiplied unrounded: a row would depend on others.
        return package.BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    torchao: Any = importlib.import_module("torchao.quantization")
    kind = torchao.Int8WeightOnlyConfig if weight_format == "torchao-int8" else torchao.Float8WeightOnlyConfig
    # The setter changes float32 products of the whole process to TF32, those of other models too.
    return package.TorchAoConfig(kind(set_inductor_config=False))


def _from_gguf(name: str, file: str, folder: Path, classes: Mapping[str, list[str]], dtype: torch.dtype) -> Any:
    """Return the denoiser `name` with the weights of a GGUF file and the configuration in `folder`."""
    if name not in classes:
        raise ValueError(f"quantization.gguf: it has no {name}; it has {', '.join(sorted(classes))}")
    if not Path(file).is_file():
        raise ValueError(f"quantization.gguf: no such file: {file}")
    kind: Any = getattr(diffusers, classes[name][1])
    if not hasattr(kind, "from_single_file"):
        raise ValueError(f"quantization.gguf: diffusers loads no GGUF files of {kind.__name__}; use torchao-int8")
    config = diffusers.GGUFQuantizationConfig(compute_dtype=dtype)
    return kind.from_single_file(
        file, config=str(folder), subfolder=name, quantization_config=config, dtype=dtype, local_files_only=True
    )
