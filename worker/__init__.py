"""The GPU side: claims jobs, runs them in fused forwards, uploads their outputs."""
