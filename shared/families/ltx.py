"""LTX-Video and LTX-2."""

from shared.architectures.family import Denoiser, Encoder, Family
from shared.architectures.stacking_rules import TIMES, Argument, Kind, forward, rules_for
from shared.tasks import Task

FAMILY = Family(
    denoisers={
        # One time per row for text-to-video, one per token for image-to-video.
        "LTXVideoTransformer3DModel": Denoiser(
            forward("hidden_states", "encoder_hidden_states", "encoder_attention_mask", "video_coords", timestep=TIMES)
        ),
        "LTX2VideoTransformer3DModel": Denoiser(
            forward(
                "hidden_states",
                "audio_hidden_states",
                "encoder_hidden_states",
                "audio_encoder_hidden_states",
                "encoder_attention_mask",
                "audio_encoder_attention_mask",
                "video_coords",
                "audio_coords",
                "perturbation_mask",
                # As above; image-to-video gives `audio_timestep` too.
                timestep=TIMES,
                audio_timestep=Argument(Kind.ROWS, dtype="float32", like="timestep"),
                sigma=TIMES,
                audio_sigma=TIMES,
            )
        ),
        # Called once for each video.
        "LTXLatentUpsamplerModel": Denoiser(forward("hidden_states")),
        "LTX2LatentUpsamplerModel": Denoiser(forward("hidden_states")),
    },
    # Not LTX2VocoderWithBWE, whose rows differ by up to 1e-4.
    encoders={
        "AutoencoderKLLTXVideo": Encoder(divisible=True),
        "AutoencoderKLLTX2Video": Encoder({"encode": rules_for("x"), "decode": rules_for("z", "temb")}, divisible=True),
        "AutoencoderKLLTX2Audio": Encoder({"decode": rules_for("z")}),
        "LTX2TextConnectors": Encoder(forward("text_encoder_hidden_states", "attention_mask")),
        "LTX2Vocoder": Encoder(forward("hidden_states")),
    },
    siblings={
        ("LTX2Pipeline", Task.IMAGE_TO_VIDEO): "LTX2ImageToVideoPipeline",
        ("LTX2ImageToVideoPipeline", Task.TEXT_TO_VIDEO): "LTX2Pipeline",
        ("LTX2Pipeline", Task.EXTEND_VIDEO): "LTX2ConditionPipeline",
        ("LTX2ImageToVideoPipeline", Task.EXTEND_VIDEO): "LTX2ConditionPipeline",
        ("LTX2ConditionPipeline", Task.IMAGE_TO_VIDEO): "LTX2ImageToVideoPipeline",
        ("LTX2InContextPipeline", Task.EXTEND_VIDEO): "LTX2ConditionPipeline",
        ("LTX2InContextPipeline", Task.IMAGE_TO_VIDEO): "LTX2ImageToVideoPipeline",
        ("LTX2Pipeline", Task.VIDEO_TO_VIDEO): "LTX2InContextPipeline",
        ("LTX2ImageToVideoPipeline", Task.VIDEO_TO_VIDEO): "LTX2InContextPipeline",
        ("LTX2ConditionPipeline", Task.VIDEO_TO_VIDEO): "LTX2InContextPipeline",
    },
    upscalers={"LTXLatentUpsamplePipeline": (2,), "LTX2LatentUpsamplePipeline": (2,)},
)
