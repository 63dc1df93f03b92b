"""`ResponseStore`: answers of /v1/responses in an SQLite file, which all HTTP processes of a service share.

Every answer is stored with the items of its whole conversation, so that a conversation can go on although its older
answers have been removed. Each owner sees only their own answers.
"""

import os
import sqlite3
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from server.config import ServerConfig
from server.errors import SettingError

_BUSY_TIMEOUT_S = 10.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created REAL NOT NULL, num_bytes INTEGER NOT NULL,
    body BLOB NOT NULL, items BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS answers_by_age ON answers (created, num_bytes);
"""


class ResponseStore:
    """Keeps the newest answers: none older than `max_age_s`, and together at most `max_bytes`. Usable from threads."""

    def __init__(self, file: Path, *, max_bytes: int, max_age_s: float) -> None:
        """Open the file, or make it, readable for nobody else. Raises SettingError."""
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._lock = threading.Lock()
        try:
            os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))
            self._database = sqlite3.connect(file, timeout=_BUSY_TIMEOUT_S, check_same_thread=False)
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._database.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise SettingError(f"response_store: {file} cannot be used as an SQLite file: {error}") from error

    def put(self, owner: str, body: dict[str, Any], items: Sequence[Any]) -> None:
        """Store an answer with its conversation, and remove what is too old or too much. Raises sqlite3.Error."""
        data, conversation = orjson.dumps(body), orjson.dumps(items)
        row = (body["id"], owner, time.time(), len(data) + len(conversation), data, conversation)
        with self._lock, self._database as database:
            database.execute("INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?)", row)
            database.execute("DELETE FROM answers WHERE created < ?", (time.time() - self._max_age_s,))
            [num_bytes] = database.execute("SELECT SUM(num_bytes) FROM answers").fetchone()
            while num_bytes > self._max_bytes:
                oldest = "SELECT id, num_bytes FROM answers ORDER BY created LIMIT 1"
                removed, size = database.execute(oldest).fetchone()
                database.execute("DELETE FROM answers WHERE id = ?", (removed,))
                num_bytes -= size

    def body(self, owner: str, response_id: str) -> bytes | None:
        """The JSON of an answer; None if the owner has none of this id."""
        return self._column("body", owner, response_id)

    def items(self, owner: str, response_id: str) -> list[Any] | None:
        """The items of an answer's conversation, its output included; None if the owner has none of this id."""
        data = self._column("items", owner, response_id)
        return None if data is None else orjson.loads(data)

    def delete(self, owner: str, response_id: str) -> bool:
        """Remove an answer; False if the owner has none of this id."""
        with self._lock, self._database as database:
            found = database.execute("DELETE FROM answers WHERE id = ? AND owner = ?", (response_id, owner))
            return found.rowcount > 0

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def _column(self, column: str, owner: str, response_id: str) -> bytes | None:
        query = f"SELECT {column} FROM answers WHERE id = ? AND owner = ? AND created >= ?"
        with self._lock:
            row = self._database.execute(query, (response_id, owner, time.time() - self._max_age_s)).fetchone()
        return None if row is None else bytes(row[0])


def open_store(config: ServerConfig) -> ResponseStore | None:
    """The store that the settings ask for. Raises SettingError."""
    if config.response_store is None:
        return None
    max_bytes, max_age_s = config.response_store_bytes, config.response_store_age
    return ResponseStore(config.response_store, max_bytes=max_bytes, max_age_s=max_age_s)
