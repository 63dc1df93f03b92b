"""`Keyring`: whose key a request carries, and which paths it opens.

    /health, /health/live, /health/ready     open to all
    `/` and its files, if there is a page    open to all
    `ADMIN_PATHS`, if there is an admin key  the admin key alone
    `ORDER_PATHS`, if there is any key       the admin key alone
    everything else, even without a route    any key, if the service has keys

A key travels as `Authorization: Bearer KEY` or, as Anthropic's clients send it, as `x-api-key: KEY`.

`client_keys` reads the keys of the setting `api_key`, each with limits of its own if it has some:

    one,two max_requests=4 tokens_per_minute=60000
"""

import hashlib
import hmac
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers

from server.errors import BadRequest, Forbidden, SettingError, Unauthorized

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
ADMIN_PATHS = frozenset({"/metrics", "/expert_load"})
ORDER_PATHS = frozenset({"/reset_prefix_cache", "/start_profile", "/stop_profile"})

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_KEY = re.compile(r"[!-~]+")
_LIMIT = re.compile(r"(max_requests|tokens_per_minute)=([1-9]\d{0,8}|none)")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientKey:
    """A key of clients: the answers that it may have in flight, and its tokens a minute. None means no limit."""

    text: str = ""
    max_requests: int | None = None
    tokens_per_minute: int | None = None


def client_keys(setting: str, defaults: ClientKey) -> tuple[ClientKey, ...]:
    """The keys of `api_key`, separated by commas. `defaults` has the limits of keys that name none.

    Raises:
        SettingError: a key cannot be sent, stands twice, or is followed by anything but limits. No message shows a key.
    """
    parts = setting.split(",")
    names = ["api_key"] if len(parts) == 1 else [f"api_key {number}" for number in range(1, len(parts) + 1)]
    keys = [_client_key(name, part, defaults) for name, part in zip(names, parts, strict=True)]
    if len({key.text for key in keys}) < len(keys):
        raise SettingError("api_key holds a key twice: give every client a key of its own")
    return tuple(keys)


def check_key(name: str, text: str) -> None:
    """Raise SettingError if a header cannot carry the key `text`. `name` begins the message."""
    if not _KEY.fullmatch(text):
        raise SettingError(
            f"{name} is empty or holds spaces or characters beyond ASCII, which cannot be sent in a header: "
            "give another key, or leave the setting out to serve without one"
        )


def _client_key(name: str, setting: str, defaults: ClientKey) -> ClientKey:
    text, *others = filter(None, setting.split(" ")) if setting.strip(" ") else [""]
    check_key(name, text)
    limits: dict[str, int | None] = {}
    for word in others:
        limit = _LIMIT.fullmatch(word)
        if limit is None or limit[1] in limits:
            raise SettingError(
                f"{name} holds a space: only max_requests=N and tokens_per_minute=N may follow a key, each "
                "once, where N is a whole number from 1, or none"
            )
        limits[limit[1]] = None if limit[2] == "none" else int(limit[2])
    return replace(defaults, text=text, **limits)


class Keyring:
    """Finds keys in the same time for every key, known or not."""

    def __init__(self, keys: Sequence[ClientKey], admin_key: str | None, open_paths: Collection[str] = ()) -> None:
        """`open_paths` need no key, beside `OPEN_PATHS`."""
        self._open_paths = OPEN_PATHS.union(open_paths)
        self._keys = [_digest(key.text) for key in keys]
        self._admin_key = None if admin_key is None else _digest(admin_key)

    def check(self, path: str, headers: Headers) -> int | None:
        """The number of the request's key; None for the admin key, and where none is needed.

        Raises:
            Unauthorized: the path needs a key, and the request has none that is known.
            Forbidden: the path needs the admin key.
            BadRequest: the path holds control characters, which patterns of routes may read in other ways than we do.
        """
        if path in self._open_paths or (not self._keys and self._admin_key is None):
            return None
        given = _digest(key_of(headers))
        has_admin = self._admin_key is not None
        matches = [index for index, key in enumerate(self._keys) if hmac.compare_digest(given, key)]
        is_admin = self.is_admin(headers)
        needs_admin = path in ORDER_PATHS or (has_admin and path in ADMIN_PATHS)
        if not is_admin and not matches and (self._keys or needs_admin):
            raise Unauthorized("a valid key is needed: send it as 'Authorization: Bearer KEY', or as 'x-api-key: KEY'")
        if needs_admin and not is_admin:
            advice = "" if has_admin else ": the service has none yet (--admin-key)"
            raise Forbidden(f"this path needs the admin key{advice}")
        if _CONTROL.search(path):
            raise BadRequest("the path holds control characters")
        return None if is_admin or not matches else matches[0]

    def is_admin(self, headers: Headers) -> bool:
        """Whether a request may do everything: it has the admin key, or the service has no keys at all."""
        if self._admin_key is None:
            return not self._keys
        return hmac.compare_digest(_digest(key_of(headers)), self._admin_key)


def key_of(headers: Headers) -> str:
    """The key that a request carries; empty if none."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    return bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()


def keys_of(values: Mapping[str, Any]) -> dict[str, str]:
    """`api_key` with the keys of `api_key_file` added.

    Raises:
        SettingError: the file cannot be read or holds no key, or a line is not as `client_keys` says. The message names
            the line and shows no key.
    """
    file = values.get("api_key_file")
    if file is None:
        return {}
    try:
        lines = Path(file).read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"api_key_file {file} cannot be read: {error}") from error
    keys = []
    for number, line in enumerate(lines, start=1):
        words = " ".join(line.split())
        if words and not words.startswith("#"):
            for each in words.split(","):
                _client_key(f"api_key_file {file}, line {number},", each, ClientKey())
            keys.append(words)
    if not keys:
        raise SettingError(f"api_key_file {file} holds no key: give one a line, or leave the setting out")
    return {"api_key": ",".join(filter(None, (values.get("api_key"), *keys)))}


def _digest(key: str) -> bytes:
    """Equal lengths, so that comparing does not tell the length of a key."""
    return hashlib.sha256(key.encode()).digest()
