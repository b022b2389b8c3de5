"""Hugging Face's protocol for pictures, as `InferenceClient` of `huggingface_hub` speaks it."""
