"""The HTTP server: OpenAI's API on one engine."""
