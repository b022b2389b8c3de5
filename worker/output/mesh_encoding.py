"""GLB files of meshes: glTF 2.0 in one file, with the vertices and faces and one plain material."""

import json
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from shared.job import Job
from worker.engine.outputs import Mesh
from worker.output.image_encoding import SOFTWARE, parameters_json
from worker.output.mesh_thumbnail import thumbnail_of

_MAGIC, _VERSION = 0x46546C67, 2
_JSON, _BINARY = 0x4E4F534A, 0x004E4942  # types of chunks
_FLOAT, _UNSIGNED_INT = 5126, 5125
_VERTICES, _INDEXES = 34962, 34963  # uses of buffers
_TRIANGLES = 4
_MATERIAL = {
    "pbrMetallicRoughness": {"baseColorFactor": [0.8, 0.8, 0.8, 1.0], "metallicFactor": 0.0, "roughnessFactor": 0.9},
    "doubleSided": True,
}


@dataclass(frozen=True)
class EncodedMesh:
    """A GLB file and its JPEG thumbnail."""

    data: bytes
    thumbnail: bytes
    vertices: int
    faces: int


def encode_mesh(mesh: Mesh, job: Job, index: int) -> EncodedMesh:
    """Return mesh `index` of `job` as a file; its parameters are written only when `job.embed_parameters` is set."""
    notes = {"parameters": parameters_json(job, index)} if job.embed_parameters else None
    return EncodedMesh(
        glb_of(mesh, notes),
        thumbnail_of(mesh, job.width, job.height, job.output_quality),
        len(mesh.vertices),
        len(mesh.faces),
    )


def glb_of(mesh: Mesh, notes: dict[str, str] | None = None) -> bytes:
    """Return a mesh as a GLB file with `notes` as extras of its asset."""
    vertices, faces = (np.ascontiguousarray(part) for part in (mesh.vertices, mesh.faces))
    binary = vertices.astype("<f4").tobytes() + faces.astype("<u4").tobytes()
    text = json.dumps(_scene(mesh, vertices.nbytes, faces.nbytes, notes), separators=(",", ":")).encode()
    text += b" " * (-len(text) % 4)  # chunks end at multiples of 4 bytes; those of numbers do
    chunks = struct.pack("<II", len(text), _JSON) + text + struct.pack("<II", len(binary), _BINARY) + binary
    return struct.pack("<III", _MAGIC, _VERSION, 12 + len(chunks)) + chunks


def _scene(mesh: Mesh, vertex_bytes: int, face_bytes: int, notes: dict[str, str] | None) -> dict[str, Any]:
    bounds = {name: [float(value) for value in edge(mesh.vertices, axis=0)] for name, edge in _BOUNDS.items()}
    return {
        "asset": {"version": "2.0", "generator": SOFTWARE, **({} if notes is None else {"extras": notes})},
        "scene": 0,
        "scenes": [{"nodes": [0]}],
        "nodes": [{"mesh": 0}],
        "meshes": [{"primitives": [{"attributes": {"POSITION": 0}, "indices": 1, "material": 0, "mode": _TRIANGLES}]}],
        "materials": [_MATERIAL],
        "accessors": [
            {"bufferView": 0, "componentType": _FLOAT, "count": len(mesh.vertices), "type": "VEC3", **bounds},
            {"bufferView": 1, "componentType": _UNSIGNED_INT, "count": mesh.faces.size, "type": "SCALAR"},
        ],
        "bufferViews": [
            {"buffer": 0, "byteOffset": 0, "byteLength": vertex_bytes, "target": _VERTICES},
            {"buffer": 0, "byteOffset": vertex_bytes, "byteLength": face_bytes, "target": _INDEXES},
        ],
        "buffers": [{"byteLength": vertex_bytes + face_bytes}],
    }


_BOUNDS = {"min": np.min, "max": np.max}
