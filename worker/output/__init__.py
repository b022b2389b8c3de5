"""Outputs as objects in storage: image and video encoding, uploads, previews."""
