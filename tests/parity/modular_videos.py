"""The rows of modular pipelines of videos."""

from __future__ import annotations

from functools import partial

from parity.cells import Cell
from parity.videos import BOTH, IMAGES, TEXT, first, from_images, late, mixed, spec, texts

# A guidance of 1 fails in the plain calls of Wan, HunyuanVideo and LTX (diffusers 0.42: no negative embedding).
_GUIDED = {
    name: {**fields, "guidance_scale": max(1.5, fields.get("guidance_scale", 4.0))} for name, fields in texts().items()
}
_IMAGES = from_images(_GUIDED)
_SECOND = {
    name: {**fields, "guidance_scale_2": 2.0 + at} for at, (name, fields) in enumerate(first(_GUIDED, 2).items())
}
_SMALL = mixed(texts(width=32, height=32))
_CHUNK = mixed(texts(33))
_WIDE = mixed(texts(33, width=128))
_SOUND = "fusing the vocoder (rows differ by up to 1e-4): once per job"

_text = partial(Cell, family="Modular pipelines", tasks=TEXT, jobs=_GUIDED, joining=late(_GUIDED), spec=spec())
_image = partial(Cell, family="Modular pipelines", tasks=IMAGES, jobs=_IMAGES, joining=late(_IMAGES), spec=spec())
_both = partial(Cell, family="Modular pipelines", tasks=BOTH)
_small = partial(_both, jobs=_SMALL, joining=late(_SMALL), spec=spec(width=32, height=32), limits=_SOUND)

CELLS: tuple[Cell, ...] = (
    _text(models="Wan 2.1 T2V", pipelines="WanModularPipeline", tiny="modular-wan"),
    _text(
        models="Wan 2.2 T2V A14B (two denoisers)",
        pipelines="Wan22ModularPipeline",
        tiny="modular-wan-2.2",
        jobs=_GUIDED | {f"second-{name}": fields for name, fields in _SECOND.items()},
    ),
    _image(models="Wan 2.1 I2V", pipelines="WanImage2VideoModularPipeline", tiny="modular-wan-i2v"),
    _image(
        models="Wan 2.2 I2V A14B (two denoisers)",
        pipelines="Wan22Image2VideoModularPipeline",
        tiny="modular-wan-2.2-i2v",
    ),
    _text(models="HunyuanVideo 1.5 T2V", pipelines="HunyuanVideo15ModularPipeline", tiny="modular-hunyuan-video-1.5"),
    _image(
        models="HunyuanVideo 1.5 I2V",
        pipelines="HunyuanVideo15ModularPipeline",
        tiny="modular-hunyuan-video-1.5-i2v",
    ),
    _both(
        models="Helios base",
        pipelines="HeliosModularPipeline",
        tiny="modular-helios",
        jobs=_CHUNK,
        joining=late(_CHUNK),
        spec=spec(33),
    ),
    _both(
        models="Helios mid",
        pipelines="HeliosPyramidModularPipeline",
        tiny="modular-helios-mid",
        jobs=_WIDE,
        joining=late(_WIDE),
        spec=spec(33, width=128),
        caches_steps=False,
    ),
    _both(
        models="LTX-Video",
        pipelines="LTXModularPipeline",
        tiny="modular-ltx",
        jobs=mixed(_GUIDED),
        joining=late(mixed(_GUIDED)),
        spec=spec(),
    ),
    _small(models="LTX-2.3 (with sound)", pipelines="LTX2ModularPipeline", tiny="modular-ltx-2"),
    _small(
        models="LTX-2.5 (with sound)",
        pipelines="LTX25ModularPipeline",
        tiny="modular-ltx-2.5",
        limits=f"{_SOUND}; the diffusion decoder draws noise: once per job",
    ),
    _small(models="Echo (with sound)", pipelines="EchoModularPipeline", tiny="modular-echo", caches_steps=False),
)
