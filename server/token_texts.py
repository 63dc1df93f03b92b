"""`TokenTexts`: the text of every token as it stands inside a JSON string, so that a stream need not encode it anew."""

import orjson

from server.parsers import TokenBytes


class TokenTexts(dict[int, bytes | None]):
    """Maps a token id to its JSON text, without quotes; grows with use, up to the size of the vocabulary.

    None for a control token, and for one whose bytes are not whole characters, or none at all: what such a token adds
    depends on its neighbours.
    """

    def __init__(self, tokenizer: TokenBytes) -> None:
        super().__init__(dict.fromkeys(tokenizer.special_tokens.values()))
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> bytes | None:
        try:
            text = self._tokenizer.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            text = ""
        encoded = self[token_id] = orjson.dumps(text)[1:-1] if text else None
        return encoded
