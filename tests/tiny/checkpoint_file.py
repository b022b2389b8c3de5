"""Checkpoints of tiny pipelines: their weights in one file, by the names of the original code.

The reverse of what diffusers does when it loads such a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

State = dict[str, torch.Tensor]
_RESNET = {
    "norm1.": "in_layers.0.",
    "conv1.": "in_layers.2.",
    "norm2.": "out_layers.0.",
    "conv2.": "out_layers.3.",
    "time_emb_proj.": "emb_layers.1.",
    "conv_shortcut.": "skip_connection.",
}
_UNET = {
    "time_embedding.linear_1.": "time_embed.0.",
    "time_embedding.linear_2.": "time_embed.2.",
    "add_embedding.linear_1.": "label_emb.0.0.",
    "add_embedding.linear_2.": "label_emb.0.2.",
    "conv_in.": "input_blocks.0.0.",
    "conv_norm_out.": "out.0.",
    "conv_out.": "out.2.",
    "mid_block.resnets.0.": "middle_block.0.",
    "mid_block.attentions.0.": "middle_block.1.",
    "mid_block.resnets.1.": "middle_block.2.",
}
_VAE = {
    "conv_norm_out.": "norm_out.",
    "conv_shortcut.": "nin_shortcut.",
    "downsamplers.0.": "downsample.",
    "upsamplers.0.": "upsample.",
    "resnets.": "block.",
    "down_blocks.": "down.",
    "mid_block.block.0.": "mid.block_1.",
    "mid_block.block.1.": "mid.block_2.",
    "mid_block.attentions.0.": "mid.attn_1.",
    "group_norm.": "norm.",
    "to_q.": "q.",
    "to_k.": "k.",
    "to_v.": "v.",
    "to_out.0.": "proj_out.",
}
_OPEN_CLIP = {
    "text_model.embeddings.position_embedding.weight": "positional_embedding",
    "text_model.embeddings.": "",
    "text_model.final_layer_norm.": "ln_final.",
    "text_model.encoder.layers.": "transformer.resblocks.",
    "layer_norm": "ln_",
    "mlp.fc1.": "mlp.c_fc.",
    "mlp.fc2.": "mlp.c_proj.",
    "self_attn.": "attn.",
}
_FLUX = {
    "time_text_embed.timestep_embedder.linear_1.": "time_in.in_layer.",
    "time_text_embed.timestep_embedder.linear_2.": "time_in.out_layer.",
    "time_text_embed.text_embedder.linear_1.": "vector_in.in_layer.",
    "time_text_embed.text_embedder.linear_2.": "vector_in.out_layer.",
    "time_text_embed.guidance_embedder.linear_1.": "guidance_in.in_layer.",
    "time_text_embed.guidance_embedder.linear_2.": "guidance_in.out_layer.",
    "context_embedder.": "txt_in.",
    "x_embedder.": "img_in.",
    "norm_out.linear.": "final_layer.adaLN_modulation.1.",
}
_FLUX_DOUBLE = {
    "norm1.linear.": "img_mod.lin.",
    "norm1_context.linear.": "txt_mod.lin.",
    "attn.norm_q.weight": "img_attn.norm.query_norm.scale",
    "attn.norm_k.weight": "img_attn.norm.key_norm.scale",
    "attn.norm_added_q.weight": "txt_attn.norm.query_norm.scale",
    "attn.norm_added_k.weight": "txt_attn.norm.key_norm.scale",
    "ff.net.0.proj.": "img_mlp.0.",
    "ff.net.2.": "img_mlp.2.",
    "ff_context.net.0.proj.": "txt_mlp.0.",
    "ff_context.net.2.": "txt_mlp.2.",
    "attn.to_out.0.": "img_attn.proj.",
    "attn.to_add_out.": "txt_attn.proj.",
}
_FLUX_SINGLE = {
    "norm.linear.": "modulation.lin.",
    "attn.norm_q.weight": "norm.query_norm.scale",
    "attn.norm_k.weight": "norm.key_norm.scale",
    "proj_out.": "linear2.",
}

_SD3 = {
    "pos_embed.pos_embed": "pos_embed",
    "pos_embed.proj.": "x_embedder.proj.",
    "time_text_embed.timestep_embedder.linear_1.": "t_embedder.mlp.0.",
    "time_text_embed.timestep_embedder.linear_2.": "t_embedder.mlp.2.",
    "time_text_embed.text_embedder.linear_1.": "y_embedder.mlp.0.",
    "time_text_embed.text_embedder.linear_2.": "y_embedder.mlp.2.",
    "norm_out.linear.": "final_layer.adaLN_modulation.1.",
}
_SD3_BLOCK = {
    "norm1_context.linear.": "context_block.adaLN_modulation.1.",
    "norm1.linear.": "x_block.adaLN_modulation.1.",
    "ff_context.net.0.proj.": "context_block.mlp.fc1.",
    "ff_context.net.2.": "context_block.mlp.fc2.",
    "ff.net.0.proj.": "x_block.mlp.fc1.",
    "ff.net.2.": "x_block.mlp.fc2.",
    "attn.to_out.0.": "x_block.attn.proj.",
    "attn.to_add_out.": "context_block.attn.proj.",
}
_QKV = (("x_block", ("attn.to_q", "attn.to_k", "attn.to_v")),)
_QKV += (("context_block", ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")),)


def weights_of(pipeline: Any) -> State:
    """Return all weights of Stable Diffusion 1.x or XL, or those of the denoiser of SD3 or FLUX.1."""
    if hasattr(pipeline, "transformer"):
        return (sd3 if hasattr(pipeline, "text_encoder_3") else flux)(pipeline.transformer)
    state = _with_prefix("model.diffusion_model.", unet(pipeline.unet)) | _with_prefix(
        "first_stage_model.", vae(pipeline.vae)
    )
    if not hasattr(pipeline, "text_encoder_2"):
        return state | _with_prefix("cond_stage_model.transformer.", _clip(pipeline.text_encoder))
    first = _with_prefix("conditioner.embedders.0.transformer.", _clip(pipeline.text_encoder))
    return state | first | _with_prefix("conditioner.embedders.1.model.", _open_clip(pipeline.text_encoder_2))


def all_of_flux(pipeline: Any) -> State:
    """Return the weights of FLUX.1 with those of its VAE and text encoders, as ComfyUI saves them."""
    return (
        _with_prefix("model.diffusion_model.", flux(pipeline.transformer))
        | _with_prefix("vae.", vae(pipeline.vae))
        | _with_prefix("text_encoders.clip_l.transformer.", _clip(pipeline.text_encoder))
        | _with_prefix("text_encoders.t5xxl.transformer.", pipeline.text_encoder_2.state_dict())
    )


def save(state: Mapping[str, torch.Tensor], file: Path) -> Path:
    save_file({name: tensor.clone().contiguous() for name, tensor in state.items()}, file)
    return file


def unet(module: Any) -> State:
    layers = module.config.layers_per_block + 1
    return {_unet_name(name, layers, module): tensor for name, tensor in module.state_dict().items()}


def _unet_name(name: str, layers: int, module: Any) -> str:
    found = re.fullmatch(r"(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.(.*)", name)
    if found is None:
        return _replaced(name, _UNET | (_RESNET if "resnets" in name else {}))
    way, block, kind, at, rest = found[1], int(found[2]), found[3], int(found[4]), found[5]
    if kind in ("resnets", "attentions"):
        place = block * layers + at + (way == "down")
        slot = "0." + _replaced(rest, _RESNET) if kind == "resnets" else f"1.{rest}"
        return f"{'input' if way == 'down' else 'output'}_blocks.{place}.{slot}"
    if way == "down":
        return f"input_blocks.{(block + 1) * layers}.0.op.{rest.removeprefix('conv.')}"
    slot = "2" if getattr(module.up_blocks[block], "attentions", None) is not None else "1"
    return f"output_blocks.{(block + 1) * layers - 1}.{slot}.{rest}"


def vae(module: Any) -> State:
    blocks, state = len(module.config.up_block_types), {}
    for name, tensor in module.state_dict().items():
        turned = re.sub(r"up_blocks\.(\d+)\.", lambda found: f"up.{blocks - 1 - int(found[1])}.", name)
        is_linear = ".attentions." in name and tensor.ndim == 2
        state[_replaced(turned, _VAE)] = tensor[:, :, None, None] if is_linear else tensor
    return state


def _clip(module: Any) -> State:
    return {f"text_model.{name.removeprefix('text_model.')}": value for name, value in module.state_dict().items()}


def _open_clip(module: Any) -> State:
    state = module.state_dict()
    renamed = {
        _replaced(name, _OPEN_CLIP): value
        for name, value in state.items()
        if "_proj." not in name or "out_proj" in name
    }
    renamed["text_projection"] = renamed.pop("text_projection.weight").T
    for name in state:
        if ".q_proj." in name:
            joined = torch.cat([state[name.replace(".q_proj.", f".{one}_proj.")] for one in "qkv"])
            renamed[_replaced(name, _OPEN_CLIP).replace("q_proj.", "in_proj_")] = joined
    return renamed


def sd3(module: Any) -> State:
    state, renamed = module.state_dict(), {}
    last = f"transformer_blocks.{module.config.num_layers - 1}.norm1_context."
    for name, tensor in state.items():
        kind, at, rest = (*name.split(".", 2), "", "")[:3]
        value = torch.cat(tensor.chunk(2)[::-1]) if name.startswith((last, "norm_out.")) else tensor
        if kind != "transformer_blocks":
            new = f"final_layer.linear.{at}" if kind == "proj_out" else _replaced(name, _SD3)
            renamed[new] = value
        elif not any(part in rest for _, parts in _QKV for part in parts):
            renamed[f"joint_blocks.{at}.{_replaced(rest, _SD3_BLOCK)}"] = value
        elif rest.startswith("attn.to_q."):
            end = rest.rpartition(".")[2]
            for block, parts in _QKV:
                renamed[f"joint_blocks.{at}.{block}.attn.qkv.{end}"] = _cat(state, f"{kind}.{at}.", end, *parts)
    return _with_prefix("model.diffusion_model.", renamed)


def flux(module: Any) -> State:
    state, renamed = module.state_dict(), {}
    for name, tensor in state.items():
        if name.startswith("transformer_blocks."):
            _, at, rest = name.split(".", 2)
            new = f"double_blocks.{at}.{_replaced(rest, _FLUX_DOUBLE)}"
        elif name.startswith("single_transformer_blocks."):
            _, at, rest = name.split(".", 2)
            new = f"single_blocks.{at}.{_replaced(rest, _FLUX_SINGLE)}"
        else:
            new = (
                f"final_layer.linear.{name.removeprefix('proj_out.')}"
                if name.startswith("proj_out.")
                else _replaced(name, _FLUX)
            )
        renamed[new] = torch.cat(tensor.chunk(2)[::-1]) if name.startswith("norm_out.") else tensor
    joined = dict(_joined(state))
    parts = ("to_q.", "to_k.", "to_v.", "add_q_proj.", "add_k_proj.", "add_v_proj.", "proj_mlp.")
    return {name: tensor for name, tensor in renamed.items() if not any(part in name for part in parts)} | joined


def _joined(state: State) -> Iterator[tuple[str, torch.Tensor]]:
    for name in state:
        kind, at, rest = (*name.split(".", 2), "", "")[:3]
        end = rest.rpartition(".")[2]
        prefix = f"{kind}.{at}."
        if rest.startswith("attn.to_q.") and kind == "transformer_blocks":
            yield (
                f"double_blocks.{at}.img_attn.qkv.{end}",
                _cat(state, prefix, end, "attn.to_q", "attn.to_k", "attn.to_v"),
            )
            added = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
            yield f"double_blocks.{at}.txt_attn.qkv.{end}", _cat(state, prefix, end, *added)
        elif rest.startswith("attn.to_q."):
            names = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
            yield f"single_blocks.{at}.linear1.{end}", _cat(state, prefix, end, *names)


def _cat(state: State, prefix: str, end: str, *names: str) -> torch.Tensor:
    return torch.cat([state[f"{prefix}{name}.{end}"] for name in names])


def _replaced(name: str, names: Mapping[str, str]) -> str:
    for old, new in names.items():
        name = name.replace(old, new)
    return name


def _with_prefix(prefix: str, state: State) -> State:
    return {prefix + name: tensor for name, tensor in state.items()}
