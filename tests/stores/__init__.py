"""`make stores`: S3 servers, Redis servers and a proxy that the service is used with, from their registries."""
