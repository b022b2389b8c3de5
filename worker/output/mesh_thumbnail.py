"""Pictures of meshes, drawn on the CPU without a display."""

import io

import numpy as np
import numpy.typing as npt
from PIL import Image

from worker.engine.outputs import Mesh

_YAW, _PITCH = np.radians(30), np.radians(20)
_GROUND, _SURFACE = 255, np.array((186, 190, 198), np.float32)
_AMBIENT = 0.35
_LIGHT = np.array((0.2, 0.5, 0.84), np.float32)  # from where: right, above, and the viewer
_MARGIN = 0.9  # the share of the picture's shorter side that the mesh fills at most
_FINER = 2  # points along each side of a pixel, which are averaged
_POINTS_AT_ONCE = 2_000_000  # 100 MB
_MAX_CUTS = 2048  # of an edge: as many pixels as the longest one can have

Points = npt.NDArray[np.float32]


def thumbnail_of(mesh: Mesh, width: int, height: int, quality: int) -> bytes:
    """Return a JPEG of a mesh, seen from above and from its right, as a file."""
    picture = Image.fromarray(draw(mesh, width * _FINER, height * _FINER)).resize((width, height), Image.Resampling.BOX)
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=quality)
    return file.getvalue()


def draw(mesh: Mesh, width: int, height: int) -> npt.NDArray[np.uint8]:
    """Return the pixels [height, width, 3] of a mesh: each face in one shade, by its angle to the viewer."""
    places, shades = _project(mesh, width, height)
    depths = np.full(width * height, np.inf, np.float32)
    levels = np.zeros(width * height, np.float32)
    corners = places[mesh.faces]
    longest = np.linalg.norm(corners[:, :, :2] - np.roll(corners, 1, axis=1)[:, :, :2], axis=2).max(axis=1)
    cuts = 2 ** np.ceil(np.log2(np.clip(np.nan_to_num(longest), 1, _MAX_CUTS))).astype(np.int64)
    for count in np.unique(cuts):
        weights = _weights(int(count))
        of_count = np.flatnonzero(cuts == count)
        for part in np.array_split(of_count, -(-len(of_count) * len(weights) // _POINTS_AT_ONCE)):
            points = np.einsum("pc,fcd->fpd", weights, corners[part]).reshape(-1, 3)
            _put(points, np.repeat(shades[part], len(weights)), depths, levels, width)
    drawn = np.isfinite(depths)[:, None]
    pixels = np.where(drawn, levels[:, None] * _SURFACE, _GROUND)
    return pixels.astype(np.uint8).reshape(height, width, 3)


def _project(mesh: Mesh, width: int, height: int) -> tuple[Points, Points]:
    """Return column, row and depth of each vertex, and the shade of each face."""
    low, high = mesh.vertices.min(axis=0), mesh.vertices.max(axis=0)
    radius = max(float(np.linalg.norm(high - low)) / 2, 1e-9)
    turned = ((mesh.vertices - (low + high) / 2) / radius) @ _view().T
    corners = turned[mesh.faces]
    normals = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    lengths = np.maximum(np.linalg.norm(normals, axis=1), 1e-20)
    shades = _AMBIENT + (1 - _AMBIENT) * np.abs(normals @ _LIGHT) / lengths
    scale = _MARGIN * min(width, height) / 2
    places = np.stack([width / 2 + scale * turned[:, 0], height / 2 - scale * turned[:, 1], -turned[:, 2]], axis=1)
    return places.astype(np.float32), shades.astype(np.float32)


def _view() -> Points:
    """Return the rotation from the mesh, with y upwards and its front at +z, to the viewer's right, up and back."""
    yaw = np.array([[np.cos(_YAW), 0, -np.sin(_YAW)], [0, 1, 0], [np.sin(_YAW), 0, np.cos(_YAW)]])
    pitch = np.array([[1, 0, 0], [0, np.cos(_PITCH), -np.sin(_PITCH)], [0, np.sin(_PITCH), np.cos(_PITCH)]])
    view: Points = (pitch @ yaw).astype(np.float32)
    return view


def _weights(count: int) -> Points:
    """Return the places of points in a triangle whose edges are cut into `count` parts, as weights of its corners."""
    first, second = np.meshgrid(np.arange(count + 1), np.arange(count + 1), indexing="ij")
    inside = first + second <= count
    pairs = np.stack([first[inside], second[inside]], axis=1) / count
    return np.concatenate([pairs, 1 - pairs.sum(axis=1, keepdims=True)], axis=1).astype(np.float32)


def _put(points: Points, shades: Points, depths: Points, levels: Points, width: int) -> None:
    """Draw points that are nearer than what is drawn."""
    columns, rows = np.floor(points[:, 0]).astype(np.int64), np.floor(points[:, 1]).astype(np.int64)
    at = rows * width + columns
    np.minimum.at(depths, at, points[:, 2])
    nearest = depths[at] == points[:, 2]
    levels[at[nearest]] = shades[nearest]
