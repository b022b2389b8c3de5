"""LoRA adapters: files, loading, and their application per row of a forward."""
