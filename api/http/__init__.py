"""HTTP mechanics that know nothing of jobs: middleware, body limits, streaming, the OpenAPI page."""
