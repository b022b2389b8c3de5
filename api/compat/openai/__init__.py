"""The protocol of OpenAI's SDKs, at the same origin."""
