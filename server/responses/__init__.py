"""The Responses API on top of chat: input items to messages, output items and events, and the store of answers."""
