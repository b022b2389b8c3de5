"""Files of meshes: GLB that other programs can read, and thumbnails that show the mesh."""

from __future__ import annotations

import io
import json
import struct

import numpy as np
import pytest
from harness.engine import a_job
from PIL import Image

from shared.tasks import OutputFormat, Task
from worker.engine.outputs import Mesh
from worker.output.mesh_encoding import encode_mesh, glb_of
from worker.output.mesh_thumbnail import draw

CORNERS = [(x, y, z) for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)]
SIDES = [(0, 1, 3, 2), (4, 6, 7, 5), (0, 4, 5, 1), (2, 3, 7, 6), (0, 2, 6, 4), (1, 5, 7, 3)]


def box(*size: float) -> Mesh:
    """A box whose faces point outwards."""
    faces = [face for a, b, c, d in SIDES for face in ((a, b, c), (a, c, d))]
    return Mesh((np.array(CORNERS) * size).astype(np.float32), np.array(faces, np.uint32))


def read(data: bytes) -> tuple[dict, Mesh]:
    """Read a GLB file as its specification says."""
    assert struct.unpack("<III", data[:12]) == (0x46546C67, 2, len(data))
    length, kind = struct.unpack("<II", data[12:20])
    assert (kind, length % 4) == (0x4E4F534A, 0)
    scene = json.loads(data[20 : 20 + length])
    binary = data[28 + length :]
    assert struct.unpack("<II", data[20 + length : 28 + length]) == (len(binary), 0x004E4942)
    views = [binary[one["byteOffset"] :][: one["byteLength"]] for one in scene["bufferViews"]]
    vertices, faces = np.frombuffer(views[0], "<f4").reshape(-1, 3), np.frombuffer(views[1], "<u4").reshape(-1, 3)
    assert [one["count"] for one in scene["accessors"]] == [len(vertices), faces.size]
    return scene, Mesh(vertices, faces)


def test_a_glb_file_has_the_vertices_and_faces() -> None:
    mesh = box(1, 2, 3)
    scene, found = read(glb_of(mesh))
    assert np.array_equal(found.vertices, mesh.vertices)
    assert np.array_equal(found.faces, mesh.faces)
    assert (scene["accessors"][0]["min"], scene["accessors"][0]["max"]) == ([-1, -2, -3], [1, 2, 3])


def test_other_programs_read_the_file() -> None:
    trimesh = pytest.importorskip("trimesh", reason="trimesh is not installed; it is in the extra `mesh`")
    found = trimesh.load(io.BytesIO(glb_of(box(1, 2, 3))), file_type="glb", force="mesh")
    assert (found.is_watertight, round(found.volume)) == (True, 48)


def test_parameters_are_written_only_when_asked_for() -> None:
    fields = {"prompt": "", "task": Task.IMAGE_TO_MESH, "output_format": OutputFormat.GLB, "seed": 7}
    plain, noted = (encode_mesh(box(1, 1, 1), a_job("job", embed_parameters=on, **fields), 1) for on in (False, True))
    assert "extras" not in read(plain.data)[0]["asset"]
    assert json.loads(read(noted.data)[0]["asset"]["extras"]["parameters"])["seed"] == 8
    assert (plain.vertices, plain.faces) == (8, 12)


def test_the_thumbnail_has_the_size_of_the_job() -> None:
    job = a_job("job", task=Task.IMAGE_TO_MESH, output_format=OutputFormat.GLB, width=96, height=64)
    with Image.open(io.BytesIO(encode_mesh(box(1, 1, 1), job, 0).thumbnail)) as image:
        assert (image.format, image.size) == ("JPEG", (96, 64))


def test_a_box_shows_three_sides_in_three_shades_without_holes() -> None:
    """From the front, above and the right, in the middle of the picture."""
    pixels = draw(box(1, 1, 1), 200, 200)
    drawn = (pixels != 255).any(axis=-1)
    assert drawn[100, 100]
    assert not drawn[[0, 0, -1, -1], [0, -1, 0, -1]].any()
    shades, counts = np.unique(pixels[drawn], axis=0, return_counts=True)
    assert (counts > 0.1 * drawn.sum()).sum() == 3
    top, front = pixels[60, 100], pixels[130, 80]
    assert (top != front).any()
    for row in drawn:  # the outline is convex: a hole would leave a gap in its row
        columns = np.flatnonzero(row)
        assert not columns.size or row[columns[0] : columns[-1] + 1].all()
    assert len(shades) == 3


def test_what_is_nearer_hides_what_is_behind() -> None:
    """A large plate before a box: its order in the file does not matter."""
    plate, small = box(1, 1, 0.01), box(0.2, 0.2, 0.2)
    plate.vertices[:, 2] += 1
    both = [
        Mesh(
            np.concatenate([one.vertices, other.vertices]),
            np.concatenate([one.faces, other.faces + len(one.vertices)]).astype(np.uint32),
        )
        for one, other in ((plate, small), (small, plate))
    ]
    assert np.array_equal(draw(both[0], 120, 120), draw(both[1], 120, 120))


@pytest.mark.parametrize("vertices", [np.zeros((3, 3)), [[0, 0, 0], [1, 0, 0], [2, 0, 0]]])
def test_a_mesh_without_area_can_be_drawn(vertices: object) -> None:
    mesh = Mesh(np.array(vertices, np.float32), np.array([[0, 1, 2]], np.uint32))
    assert draw(mesh, 32, 32).shape == (32, 32, 3)
