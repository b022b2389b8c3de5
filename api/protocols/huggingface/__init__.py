"""The protocol of `huggingface_hub.InferenceClient`."""
