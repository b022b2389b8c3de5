"""Stacking rules of the denoisers of videos."""

from collections.abc import Mapping

from worker.engine.fusion.stacking_rules import (
    GROUPED,
    REPEATED,
    ROWS,
    SAME,
    SHARED,
    TIMES,
    Argument,
    Kind,
    Methods,
    forward,
)

VIDEO_DENOISERS: Mapping[str, Methods] = {
    # Wan 2.1 and 2.2. Where tokens have times of their own (2.2 TI2V), `timestep` is [rows, tokens].
    "WanTransformer3DModel": forward(
        "hidden_states",
        "encoder_hidden_states",
        timestep=TIMES,
        encoder_hidden_states_image=GROUPED,  # first and last image are two entries of one row
    ),
    "HunyuanVideoTransformer3DModel": forward(
        "hidden_states",
        "pooled_projections",
        "guidance",
        timestep=TIMES,
        # With an image in the prompt its length varies; the mask is always given.
        encoder_hidden_states=Argument(Kind.PADDED, mask="encoder_attention_mask"),
        encoder_attention_mask=Argument(Kind.MASK, dtype="float32"),
    ),
    "HunyuanVideo15Transformer3DModel": forward(
        "hidden_states",
        "encoder_hidden_states",
        "encoder_attention_mask",
        "encoder_hidden_states_2",
        "encoder_attention_mask_2",
        "image_embeds",
        timestep=TIMES,
        timestep_r=TIMES,
    ),
    "HeliosTransformer3DModel": forward(
        "hidden_states",
        "encoder_hidden_states",
        "latents_history_short",
        "latents_history_mid",
        "latents_history_long",
        timestep=TIMES,
        indices_hidden_states=SHARED,
        indices_latents_history_short=SHARED,
        indices_latents_history_mid=SHARED,
        indices_latents_history_long=SHARED,
    ),
    "LTX2VideoTransformer3DModel": forward(
        "hidden_states",
        "audio_hidden_states",
        "encoder_hidden_states",
        "audio_encoder_hidden_states",
        "encoder_attention_mask",
        "audio_encoder_attention_mask",
        "video_coords",
        "audio_coords",
        "perturbation_mask",
        # One time per row for text-to-video, one per token for image-to-video, which gives `audio_timestep` too.
        timestep=TIMES,
        audio_timestep=Argument(Kind.ROWS, dtype="float32", like="timestep"),
        sigma=TIMES,
        audio_sigma=TIMES,
    ),
    # `control_hidden_states_scale` has one entry per layer.
    "WanVACETransformer3DModel": forward(
        "hidden_states",
        "encoder_hidden_states",
        "control_hidden_states",
        timestep=TIMES,
        encoder_hidden_states_image=GROUPED,
        control_hidden_states_scale=SAME,
    ),
    # Faces of all rows are encoded in groups that can span two rows.
    "WanAnimateTransformer3DModel": forward(
        "hidden_states",
        "encoder_hidden_states",
        "pose_hidden_states",
        "face_pixel_values",
        exact=False,
        timestep=TIMES,
        encoder_hidden_states_image=GROUPED,
    ),
    # With diffusion forcing, `timestep` is [rows, frames]. Models that embed `fps` as well take one row only
    # (diffusers 0.42), which the self-check finds.
    "SkyReelsV2Transformer3DModel": forward(
        "hidden_states",
        "encoder_hidden_states",
        timestep=TIMES,
        encoder_hidden_states_image=GROUPED,
        fps=REPEATED,
    ),
    # `ofs` has one entry for all rows.
    "CogVideoXTransformer3DModel": forward(
        "hidden_states", "encoder_hidden_states", timestep=TIMES, ofs=SAME, image_rotary_emb=SHARED
    ),
    "MochiTransformer3DModel": forward(
        "hidden_states", "encoder_hidden_states", "encoder_attention_mask", timestep=ROWS
    ),
    # Positions are functions of the shapes. Text has no mask: only prompts of equal length fuse.
    "Kandinsky5Transformer3DModel": forward(
        "hidden_states",
        "encoder_hidden_states",
        "pooled_projections",
        timestep=ROWS,
        visual_rope_pos=SHARED,
        text_rope_pos=SHARED,
    ),
    # One time per row for text-to-video, one per token for image-to-video.
    "LTXVideoTransformer3DModel": forward(
        "hidden_states", "encoder_hidden_states", "encoder_attention_mask", "video_coords", timestep=TIMES
    ),
    # The padding mask has one row for all.
    "CosmosTransformer3DModel": forward(
        "hidden_states", "encoder_hidden_states", "condition_mask", timestep=ROWS, padding_mask=SAME
    ),
    "SanaVideoTransformer3DModel": forward(
        "hidden_states", "encoder_hidden_states", "encoder_attention_mask", "guidance", timestep=ROWS
    ),
    # AnimateDiff: the text is repeated for each frame.
    "UNetMotionModel": forward(
        "sample", "timestep_cond", "added_cond_kwargs", timestep=TIMES, encoder_hidden_states=GROUPED
    ),
    "LatteTransformer3DModel": forward(
        "hidden_states", "encoder_hidden_states", "encoder_attention_mask", timestep=TIMES
    ),
    "MotifVideoTransformer3DModel": forward(
        "hidden_states", "encoder_hidden_states", "encoder_attention_mask", "image_embeds", timestep=TIMES
    ),
    # Two times per row and frame: the step's own, and that of the next one.
    "AnyFlowTransformer3DModel": forward("hidden_states", "encoder_hidden_states", timestep=TIMES, r_timestep=TIMES),
    # Wan 2.1 that edits an image by way of a short video.
    "ChronoEditTransformer3DModel": forward(
        "hidden_states", "encoder_hidden_states", timestep=TIMES, encoder_hidden_states_image=GROUPED
    ),
    # One sequence of text, sound and video, without a mask: only prompts of equal length at the same times fuse.
    "MiniMaxH3Transformer3DModel": forward(
        "hidden_states",
        "audio_hidden_states",
        "encoder_hidden_states",
        timestep=SAME,
        timestep_indices=SAME,
        token_tags=SAME,
        position_ids=SAME,
        video_indices=SAME,
        audio_indices=SAME,
        text_indices=SAME,
    ),
}
