"""The inference server: host-side memory and scheduling, one engine, an OpenAI-compatible HTTP layer."""
