"""Measurements on a GPU: `make gpu`, or `python -m bench.gpu`; each stage can run by itself."""
