"""OpenAI's protocol: images, videos, files and batches."""
