"""The GPU side: claims jobs, puts them through fused forwards, delivers their pictures."""
