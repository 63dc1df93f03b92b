"""Anthropic's Messages API on top of chat: requests to chat requests, pieces to content blocks, errors."""
