"""The folder of a model that makes meshes, as Tencent's repositories have it: a configuration, and one file of weights.

Not a diffusers folder: `config.yaml` names the classes of all parts, and the weights of all parts are in one file.
"""

from pathlib import Path

from shared.config.model_index import index_file

CONFIG = "config.yaml"


def is_shape_folder(folder: Path) -> bool:
    return index_file(folder) is None and (folder / CONFIG).is_file()


def shape_weights(folder: Path, variant: str | None) -> Path:
    """Return the file of the weights: of `variant`, such as `fp16`; the only one of a folder without a variant."""
    return folder / ("model.safetensors" if variant is None else f"model.{variant}.safetensors")
