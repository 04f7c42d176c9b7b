"""The HTTP face of an engine: OpenAI's protocol, with vLLM's extensions."""
