"""LoRA adapters: their files, and their application per row of a forward."""
