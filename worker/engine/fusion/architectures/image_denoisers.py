"""Stacking rules of the denoisers of images."""

from collections.abc import Mapping

from worker.engine.fusion.stacking_rules import (
    ADDED,
    CACHE,
    FORM,
    FRESH,
    JOINT_MASK,
    LAYERED,
    LISTED,
    LONGEST,
    PADDED,
    REPEATED,
    ROWS,
    SAME,
    SHARED,
    TIMES,
    Argument,
    Kind,
    Methods,
    StackingRules,
    forward,
)

# The pipelines of Qwen-Image drop a mask that hides nothing.
_MASKED_TEXT = Argument(Kind.PADDED, mask="encoder_hidden_states_mask")
_TEXT_MASK = Argument(Kind.MASK, dtype="bool")

CONTROL_NETS: Mapping[str, Methods] = {
    "ControlNetModel": forward(
        "sample", "encoder_hidden_states", "controlnet_cond", "timestep_cond", "added_cond_kwargs", timestep=TIMES
    ),
    "SD3ControlNetModel": forward(
        "hidden_states", "controlnet_cond", "encoder_hidden_states", "pooled_projections", timestep=ROWS
    ),
    "FluxControlNetModel": forward(
        "hidden_states",
        "controlnet_cond",
        "controlnet_mode",
        "encoder_hidden_states",
        "pooled_projections",
        "guidance",
        timestep=ROWS,
        img_ids=SAME,
        txt_ids=SHARED,
    ),
    "QwenImageControlNetModel": forward(
        "hidden_states",
        "controlnet_cond",
        timestep=ROWS,
        img_shapes=REPEATED,
        encoder_hidden_states=_MASKED_TEXT,
        encoder_hidden_states_mask=_TEXT_MASK,
    ),
}

IMAGE_DENOISERS: Mapping[str, Methods] = {
    "UNet2DConditionModel": forward(
        "sample",
        "encoder_hidden_states",
        "class_labels",
        "timestep_cond",
        "attention_mask",
        "encoder_attention_mask",
        "added_cond_kwargs",
        timestep=TIMES,
        down_block_additional_residuals=ADDED,
        mid_block_additional_residual=ADDED,
    ),
    "SD3Transformer2DModel": forward(
        "hidden_states",
        "encoder_hidden_states",
        "pooled_projections",
        timestep=ROWS,
        block_controlnet_hidden_states=FRESH,
    ),
    "FluxTransformer2DModel": forward(
        "hidden_states",
        "encoder_hidden_states",
        "pooled_projections",
        "guidance",
        timestep=ROWS,
        img_ids=SAME,  # reference images with the same number of tokens can have different shapes
        txt_ids=SHARED,
        controlnet_block_samples=FRESH,
        controlnet_single_block_samples=FRESH,
    ),
    # Its positions are those of the first row.
    "Flux2Transformer2DModel": forward(
        "hidden_states", "encoder_hidden_states", "guidance", timestep=ROWS, img_ids=SAME, txt_ids=SAME
    ),
    # Text has no mask, so prompts fuse only if their tokens fill as many windows of 80.
    "Flux3Transformer2DModel": forward(
        "hidden_states",
        "encoder_hidden_states",
        "image_cond_hidden_states",
        timestep=ROWS,
        target_timestep=ROWS,
        img_ids=SAME,
        txt_ids=SHARED,
        image_cond_ids=SAME,
    ),
    # The last two are those of Omni, whose entries are lists of images and texts.
    "ZImageTransformer2DModel": {
        "forward": StackingRules(
            "x",
            {
                **dict.fromkeys(("x", "cap_feats", "siglip_feats", "image_noise_mask"), LISTED),
                "t": ROWS,
                "return_dict": FORM,
            },
            True,
        )
    },
    "QwenImageTransformer2DModel": forward(
        "hidden_states",
        "guidance",
        "additional_t_cond",
        timestep=ROWS,
        img_shapes=REPEATED,
        controlnet_block_samples=FRESH,
        encoder_hidden_states=_MASKED_TEXT,
        encoder_hidden_states_mask=_TEXT_MASK,
    ),
    # Image positions follow the text and are those of the first row: only prompts of equal length fuse.
    "QwenImage21Transformer2DModel": forward(
        "hidden_states",
        "encoder_hidden_states",
        "encoder_hidden_states_mask",
        timestep=ROWS,
        img_shapes=REPEATED,
        img_mask=SAME,
    ),
    # Text of all prompts is padded to one length, and `segment_ids` mask the padding.
    "Ideogram4Transformer2DModel": forward(
        "hidden_states", "encoder_hidden_states", "position_ids", "segment_ids", "indicator", timestep=ROWS
    ),
    "SanaTransformer2DModel": forward(
        "hidden_states", "encoder_hidden_states", "encoder_attention_mask", "guidance", timestep=ROWS
    ),
    # The model masks `text_bth` beyond each row's `text_lens`.
    "ErnieImageTransformer2DModel": forward("hidden_states", "text_lens", timestep=ROWS, text_bth=PADDED),
    # Glyphs are not padded: attention adds their mask as ones and zeros, which hides nothing.
    "GlmImageTransformer2DModel": forward(
        "hidden_states",
        "encoder_hidden_states",
        "prior_token_id",
        "prior_token_drop",
        "target_size",
        "crop_coords",
        timestep=ROWS,
        kv_caches=CACHE,
    ),
    "PixArtTransformer2DModel": forward(
        "hidden_states", "encoder_hidden_states", "encoder_attention_mask", "added_cond_kwargs", timestep=TIMES
    ),
    "AuraFlowTransformer2DModel": forward("hidden_states", "encoder_hidden_states", timestep=ROWS),
    # Captions are padded to the longest of the forward, which changes the last bits of the others.
    "Lumina2Transformer2DModel": forward(
        "hidden_states", "encoder_hidden_states", "encoder_attention_mask", exact=False, timestep=ROWS
    ),
    "ChromaTransformer2DModel": forward(
        "hidden_states", "encoder_hidden_states", "attention_mask", timestep=ROWS, img_ids=SAME, txt_ids=SHARED
    ),
    # Text has no mask, so prompts fuse only if their tokens fill as many groups of sixteen.
    "CogView4Transformer2DModel": forward(
        "hidden_states", "encoder_hidden_states", "original_size", "target_size", "crop_coords", timestep=TIMES
    ),
    "CogView3PlusTransformer2DModel": forward(
        "hidden_states", "encoder_hidden_states", "original_size", "target_size", "crop_coords", timestep=TIMES
    ),
    # Experts get the tokens of all rows, and sum in another order for another number of them.
    "HiDreamImageTransformer2DModel": forward(
        "hidden_states",
        "encoder_hidden_states_t5",
        "pooled_embeds",
        exact=False,
        encoder_hidden_states_llama3=LAYERED,
        timesteps=TIMES,
    ),
    "HunyuanDiT2DModel": forward(
        "hidden_states",
        "encoder_hidden_states",
        "text_embedding_mask",
        "encoder_hidden_states_t5",
        "text_embedding_mask_t5",
        "image_meta_size",
        "style",
        timestep=ROWS,
        image_rotary_emb=SHARED,
    ),
    "HunyuanImageTransformer2DModel": forward(
        "hidden_states",
        "encoder_hidden_states",
        "encoder_attention_mask",
        "encoder_hidden_states_2",
        "encoder_attention_mask_2",
        "guidance",
        timestep=ROWS,
        timestep_r=ROWS,
    ),
    "Krea2Transformer2DModel": forward(
        "hidden_states", "encoder_hidden_states", "encoder_attention_mask", timestep=ROWS, position_ids=SAME
    ),
    # Experts choose among the tokens of each row, and get those of all rows, which can change the last bits.
    "NucleusMoEImageTransformer2DModel": forward(
        "hidden_states",
        exact=False,
        timestep=ROWS,
        img_shapes=REPEATED,
        encoder_hidden_states=_MASKED_TEXT,
        encoder_hidden_states_mask=_TEXT_MASK,
    ),
    "DreamLiteUNetModel": forward(
        "sample",
        "added_cond_kwargs",
        timestep=TIMES,
        encoder_hidden_states=Argument(Kind.PADDED, mask="encoder_attention_mask"),
        encoder_attention_mask=Argument(Kind.MASK, dtype="int64"),
    ),
    # Text has no mask: only prompts of equal length fuse.
    "JoyImageEditTransformer3DModel": forward("hidden_states", "encoder_hidden_states", timestep=TIMES),
    "OvisImageTransformer2DModel": forward(
        "hidden_states", "encoder_hidden_states", timestep=ROWS, img_ids=SAME, txt_ids=SAME
    ),
    "LongCatImageTransformer2DModel": forward(
        "hidden_states", "encoder_hidden_states", "guidance", timestep=ROWS, img_ids=SAME, txt_ids=SAME
    ),
    "BriaTransformer2DModel": forward(
        "hidden_states",
        "encoder_hidden_states",
        "pooled_projections",
        "guidance",
        timestep=ROWS,
        img_ids=SAME,
        txt_ids=SAME,
    ),
    # Long prompts of any length. The pipeline drops a mask that hides nothing.
    "BriaFiboTransformer2DModel": forward(
        "hidden_states",
        "pooled_projections",
        "guidance",
        encoder_hidden_states=Argument(Kind.PADDED, mask="joint_attention_kwargs"),
        text_encoder_layers=PADDED,
        joint_attention_kwargs=JOINT_MASK,
        timestep=ROWS,
        img_ids=SAME,
        txt_ids=LONGEST,
    ),
    # The number of gist tokens depends on the longest prompt of a forward: only prompts of equal length fuse.
    "BriaFibo2Transformer2DModel": forward(
        "hidden_states", "encoder_hidden_states", "encoder_attention_mask", "context_latents", timestep=ROWS
    ),
    "PRXTransformer2DModel": forward("hidden_states", "encoder_hidden_states", "attention_mask", timestep=ROWS),
    "Kandinsky3UNet": forward("sample", "encoder_hidden_states", "encoder_attention_mask", timestep=TIMES),
    # The priors of Kandinsky 2 denoise one embedding per image.
    "PriorTransformer": forward(
        "hidden_states", "proj_embedding", "encoder_hidden_states", "attention_mask", timestep=TIMES
    ),
}
