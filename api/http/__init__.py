"""HTTP mechanics independent of jobs: middleware, body limits, streaming, NDJSON, OpenAPI."""
