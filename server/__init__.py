"""HTTP: OpenAI schemas, chat formats, streaming, metrics, command line."""
