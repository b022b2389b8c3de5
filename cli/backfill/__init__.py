"""`fusequeue backfill`: an image for each prompt of a file, resumable."""
