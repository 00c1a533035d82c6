"""The OpenAI-compatible HTTP server. Needs the extra `serve`; nothing else of the package imports this one."""
