"""Log lines on standard error, as text or as JSON: the same in every process of the service."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]

FIELDS = "fields"
"""`log.info(message, extra={FIELDS: {...}})` gives a line of JSON these keys too; text shows the message alone."""

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """One line of JSON for each record: time (UTC), level, logger, process, message, fields, and the exception."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info is not None:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def json_line(level: int, name: str, message: str) -> str:
    """The line of a record of this logger, for what must be told whatever the log's level is."""
    return JsonFormatter().format(logging.LogRecord(name, level, "", 0, message, None, None))


def log_to_stderr(level: str | int, log_format: LogFormat) -> None:
    """Lines of at least this level go to standard error. Only the first call in a process counts."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=level.upper() if isinstance(level, str) else level, handlers=[handler])
