"""`fusequeue backfill`: a file of prompts in, a folder of pictures out, however often it is interrupted."""
