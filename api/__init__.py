"""The HTTP API: validates and submits jobs, returns and streams their results. It does not import torch."""
