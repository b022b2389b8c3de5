"""The engine compared with the unmodified pipelines."""
