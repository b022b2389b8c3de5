"""Architectures without stacking rules: fused by rules inferred from their calls, if the self-check verifies them."""

from __future__ import annotations

from contextlib import nullcontext

from parity.cells import LATE, TEXT, Cell, small_images

INFERRED = "no stacking rules: fused by rules inferred from its calls"

CELLS = tuple(
    Cell(
        family="(inferred)",
        models=models,
        pipelines=pipelines,
        tiny=tiny,
        jobs=TEXT,
        joining=LATE,
        limits=INFERRED,
        around=small_images("images.unlisted") if tiny == "pixart-sigma" else nullcontext,
        quick=tiny == "lumina-2",
    )
    for models, pipelines, tiny in (
        ("PixArt-Sigma", "PixArtSigmaPipeline", "pixart-sigma"),
        ("AuraFlow", "AuraFlowPipeline", "aura-flow"),
        ("Lumina 2", "Lumina2Pipeline", "lumina-2"),
        ("Chroma", "ChromaPipeline", "chroma"),
    )
)
