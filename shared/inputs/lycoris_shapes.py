"""The LoHa and LoKr layers of a file: their tensors by name, and whether the shapes of those fit each other.

`a` and `b` are [out, rank] and [rank, in * kernel]. With a core `t` [rank, rank, *kernel] they are [rank, out] and
[rank, in].
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

Shape = Sequence[int]

MAX_OUTPUTS = 2**18
MAX_COLUMNS = 2**22
"""Of one layer. FLUX.2's widest one has 55,296 outputs, and SDXL's 23,040 inputs times their kernel."""

MAX_ROWS = 2**25
"""Outputs of all products of a file. The blocks of Qwen-Image have 5.5 million."""

MAX_KERNEL = 49
"""Places of a kernel. Convolutions of denoisers have 3 x 3, 3 x 3 x 3 and 7 x 7."""

PART = re.compile(r"(?P<layer>.+)\.(?P<part>lokr_w[12](?:_[ab])?|lokr_t2|hada_w[12]_[ab]|hada_t[12])")
MAGNITUDE = re.compile(r"(?P<layer>.+)\.(?P<kind>dora_scale|lora_magnitude_vector)(?:\.weight)?")
"""Names of a DoRA's norms: LyCORIS', and PEFT's."""

_CORE = ".lora_mid.weight"
_LOW_RANK = (
    ("lora_A", "lora_B"),
    ("lora_down", "lora_up"),
    ("lora.down", "lora.up"),
    ("lora_linear_layer.down", "lora_linear_layer.up"),
)


class Size(NamedTuple):
    """The matrix that a layer's tensors are the product of; `rank` is the highest of them, 1 without one."""

    outputs: int
    columns: int
    rank: int
    is_loha: bool = False


def by_layer(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the names of the tensors of LoHa and LoKr, by layer and part."""
    layers: dict[str, dict[str, str]] = {}
    for name in names:
        if (match := PART.fullmatch(name)) is not None:
            layers.setdefault(match["layer"], {})[match["part"]] = name
    return layers


def product_sizes(shapes: Mapping[str, Shape]) -> dict[str, Size]:
    """Return the sizes of a file's products by layer; raises `ValueError`, which names the first that does not fit.

    A small file can claim large products: what is made of them has the sizes that this returns.
    """
    sizes: dict[str, Size] = {}
    rows = 0
    for layer, names in by_layer(shapes).items():
        sizes[layer] = size = _product_size(names, shapes)
        if size.outputs > MAX_OUTPUTS or size.columns > MAX_COLUMNS:
            raise ValueError(
                f"the product of {layer} is {[*size[:2]]}; at most {[MAX_OUTPUTS, MAX_COLUMNS]} is allowed"
            )
        rows += size.outputs
        if rows > MAX_ROWS:
            raise ValueError(f"the products up to {layer} have {rows} outputs in all; at most {MAX_ROWS} are allowed")
    return sizes


def _product_size(names: Mapping[str, str], shapes: Mapping[str, Shape]) -> Size:
    """Return the size of a layer's product; `names` are those of its parts, `shapes` those of tensors by name."""
    kinds = {part.partition("_")[0] for part in names}
    layer = next(iter(names.values())).rpartition(".")[0]
    if len(kinds) > 1:
        raise ValueError(f"{layer} has weights of both LoHa and LoKr")
    prefix = f"{layer}."
    own = {part: shapes[name] for part, name in names.items()}
    if kinds == {"lokr"}:
        left, right = (_factor(prefix, own, f"lokr_w{at}", "lokr_t2" if at == 2 else None) for at in (1, 2))
        return Size(left.outputs * right.outputs, left.columns * right.columns, max(left.rank, right.rank))
    if ("hada_t1" in own) != ("hada_t2" in own):
        raise ValueError(f"{prefix}hada_t{2 if 'hada_t1' in own else 1} is missing")
    first, second = (_factor(prefix, own, f"hada_w{at}", f"hada_t{at}") for at in (1, 2))
    if first[:2] != second[:2]:
        raise ValueError(f"{prefix}hada_w1_a and _b make {list(first[:2])}, but hada_w2_a and _b {list(second[:2])}")
    return Size(*first[:2], max(first.rank, second.rank), is_loha=True)


def _factor(prefix: str, shapes: Mapping[str, Shape], part: str, core: str | None) -> Size:
    """Return the size of one factor, which is one tensor, or the product of two."""
    whole = shapes.get(part)
    if whole is not None:
        if len(whole) < 2:
            raise ValueError(f"{prefix}{part} is no matrix")
        for other in (f"{part}_a", f"{part}_b", core):
            if other is not None and other in shapes:
                raise ValueError(f"{prefix}{other} is beside {part}, which is all of its matrix")
        return Size(whole[0], math.prod(whole[1:]), 1)
    for half in ("_a", "_b"):
        if f"{part}{half}" not in shapes:
            raise ValueError(f"{prefix}{part}{half} is missing")
        if len(shapes[f"{part}{half}"]) != 2:
            raise ValueError(f"{prefix}{part}{half} is no matrix")
    (outputs, rank), (inner, columns) = shapes[f"{part}_a"], shapes[f"{part}_b"]
    middle = shapes.get(core) if core is not None else None
    if middle is None:
        if rank != inner:
            raise ValueError(f"{prefix}{part}_b has rank {inner}, but {part}_a has {rank}")
        return Size(outputs, columns, rank)
    # With a core, `a` is turned round.
    _check_core(f"{prefix}{core}", middle, (outputs, inner), f"{part}_a and _b have")
    return Size(rank, columns * math.prod(middle[2:]), inner)


def core_sizes(shapes: Mapping[str, Shape]) -> dict[str, Size]:
    """Return the sizes of LoRA layers with a core (`lora_mid`); raises `ValueError` for the first that does not fit."""
    sizes = {}
    for name, core in shapes.items():
        if not name.endswith(_CORE):
            continue
        layer = name.removesuffix(_CORE)
        down, up = (shapes.get(f"{layer}.lora_{half}.weight") for half in ("down", "up"))
        if down is None or up is None or len(down) < 2 or len(up) < 2:
            raise ValueError(f"{name} has no lora_down and lora_up that it is for")
        _check_core(name, core, (up[1], down[0]), "lora_up and lora_down have")
        columns = math.prod(down[1:]) * math.prod(core[2:])
        if columns > MAX_COLUMNS:
            raise ValueError(f"{name} makes a lora_down with {columns} columns; at most {MAX_COLUMNS} are allowed")
        sizes[layer] = Size(up[0], columns, down[0])
    return sizes


def _check_core(name: str, core: Shape, ranks: tuple[int, int], of: str) -> None:
    """Raise `ValueError` for a core that is not [rank, rank, *kernel]: two ranks could make much of small matrices."""
    if len(core) < 3 or tuple(core[:2]) != ranks or ranks[0] != ranks[1]:
        raise ValueError(f"{name} is {list(core)}, but {of} the ranks {list(ranks)}")
    if math.prod(core[2:]) > MAX_KERNEL:
        raise ValueError(f"{name} has a kernel of {list(core[2:])}; at most {MAX_KERNEL} places are allowed")


def check_norms(shapes: Mapping[str, Shape], sizes: Mapping[str, Size]) -> None:
    """Raise `ValueError` for the first norms of a DoRA that do not fit their layer; `sizes` are those of products."""
    for name, shape in shapes.items():
        if (match := MAGNITUDE.fullmatch(name)) is None:
            continue
        size = sizes.get(match["layer"]) or _low_rank_size(match["layer"], shapes)
        if size is None:
            raise ValueError(f"{name} has no weights that it is for")
        count = math.prod(shape)
        of_inputs = match["kind"] == "dora_scale" and len(shape) > 1 and shape[0] == 1 < shape[1]
        if count != max(shape, default=1) or (size.columns % count if of_inputs else count != size.outputs):
            raise ValueError(f"{name} is {list(shape)}, but its layer has {size.outputs} outputs")


def _low_rank_size(layer: str, shapes: Mapping[str, Shape]) -> Size | None:
    for down, up in _LOW_RANK:
        a, b = shapes.get(f"{layer}.{down}.weight"), shapes.get(f"{layer}.{up}.weight")
        if a is not None and b is not None and len(a) > 1 and len(b) > 1:
            return Size(b[0], math.prod(a[1:]), b[1])
    return None
