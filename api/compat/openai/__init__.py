"""OpenAI's protocol, at the service's own origin."""
