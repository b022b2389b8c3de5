"""Which clients run: their packages, environments and scripts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Client:
    """A client: the page lists the versions of `packages`, `script` is a file of its environment's folder."""

    name: str
    packages: tuple[str, ...]
    environment: str
    script: str


SDKS, WRAPPERS, AIPERF, NODE = "sdks", "wrappers", "aiperf", "node"

CLIENTS = (
    Client("OpenAI, Python", ("openai",), SDKS, "openai_calls.py"),
    Client("OpenAI, Node", ("openai",), NODE, "openai.mjs"),
    Client("LiteLLM", ("litellm",), WRAPPERS, "litellm_calls.py"),
    Client("AIPerf", ("aiperf",), AIPERF, "aiperf_calls.py"),
    Client("Vercel AI, OpenAI", ("ai", "@ai-sdk/openai"), NODE, "vercel_openai.mjs"),
    Client("Vercel AI, OpenAI-compatible", ("ai", "@ai-sdk/openai-compatible"), NODE, "vercel_compatible.mjs"),
    Client("Vercel AI, Replicate", ("ai", "@ai-sdk/replicate"), NODE, "vercel_replicate.mjs"),
    Client("LangChain's DALL-E wrapper", ("langchain-community",), WRAPPERS, "langchain_calls.py"),
    Client("Replicate, Python", ("replicate",), SDKS, "replicate_calls.py"),
    Client("Replicate, JavaScript", ("replicate",), NODE, "replicate.mjs"),
    Client("Hugging Face, Python", ("huggingface_hub",), SDKS, "huggingface_calls.py"),
    Client("Hugging Face, JavaScript", ("@huggingface/inference",), NODE, "huggingface.mjs"),
    Client("fal, Python", ("fal-client",), SDKS, "fal_calls.py"),
    Client("fal, JavaScript", ("@fal-ai/client",), NODE, "fal.mjs"),
    Client("httpx-sse", ("httpx-sse",), SDKS, "sse_calls.py"),
    Client("eventsource", ("eventsource",), NODE, "eventsource.mjs"),
    Client("Standard Webhooks, Python", ("standardwebhooks",), SDKS, "webhook_calls.py"),
    Client("Standard Webhooks, JavaScript", ("standardwebhooks",), NODE, "webhooks.mjs"),
    Client("openapi-python-client", ("openapi-python-client",), SDKS, "generated_calls.py"),
    Client("MCP's Python SDK", ("mcp",), SDKS, "mcp_calls.py"),
)
