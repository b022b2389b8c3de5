"""Adapters as clients of fal, Replicate and Hugging Face name them."""

from typing import Any

import pytest

from api.protocols.adapter_names import adapter_named

UPLOADED = "adapter_01k5zt8e2vw8r4n6y9qbcdefgh"


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("ink", {"id": "ink"}),
        ("house/style", {"id": "house/style"}),
        (UPLOADED, {"id": UPLOADED}),
        ("owner/ink", {"hub": "owner/ink"}),
        ("huggingface.co/owner/ink", {"hub": "owner/ink"}),
        ("https://huggingface.co/owner/ink/", {"hub": "owner/ink"}),
        (
            "https://huggingface.co/owner/ink/blob/main/v1/a.safetensors",
            {"hub": "owner/ink", "revision": "main", "file": "v1/a.safetensors"},
        ),
        (
            "https://huggingface.co/owner/ink/resolve/v2/a.safetensors?download=true",
            {"hub": "owner/ink", "revision": "v2", "file": "a.safetensors"},
        ),
        (
            "https://huggingface.co/owner/ink/resolve/refs%2Fpr%2F1/my%20ink.safetensors",
            {"hub": "owner/ink", "revision": "refs/pr/1", "file": "my ink.safetensors"},
        ),
        ("https://files.example/a.safetensors?token=1", {"url": "https://files.example/a.safetensors?token=1"}),
        ("HTTPS://files.example/a", {"url": "HTTPS://files.example/a"}),
        ("a/b/c", {"id": "a/b/c"}),
        ("../ink", {"id": "../ink"}),
    ],
)
def test_a_text_names_an_adapter(text: str, fields: dict[str, Any]) -> None:
    """Ids of the model's list go before repositories of the hub."""
    assert adapter_named(text, {"ink", "house/style"}) == fields
