"""Cache of tuned choices on disk: its keys, and how entries are read and written. Measures nothing."""

import contextlib
import dataclasses
import hashlib
import json
import logging
import uuid
from dataclasses import dataclass
from pathlib import Path

from moe.backend import TacticTable
from moe.config import MoeA2ABackend, MoeBackend

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneKey:
    """Everything a choice depends on. `library_versions`: (name, version) of torch and of the kernel library."""

    gpu: str
    library_versions: tuple[tuple[str, str], ...]
    backend: MoeBackend
    a2a: MoeA2ABackend
    format_name: str
    tp_size: int
    ep_size: int
    num_local_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int
    token_counts: tuple[int, ...]

    @property
    def file_name(self) -> str:
        """File name that is different if any field is."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return f"{self.backend}-{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


class TuningCache:
    """Choices in memory and on disk, one file per key. An unusable folder gives a warning, not an error.

    Without a folder, entries live as long as the object.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._stored: dict[TuneKey, TacticTable | None] = {}

    def load(self, key: TuneKey) -> TacticTable | None:
        """The valid choice stored for `key`, or None."""
        if key in self._stored or self._folder is None:
            return self._stored.get(key)
        try:
            kept = json.loads((self._folder / key.file_name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        choice = kept.get("choice") if isinstance(kept, dict) else None
        if not isinstance(choice, dict) or set(choice) != {str(count) for count in key.token_counts}:
            return None
        return {str(count): str(tactic) for count, tactic in choice.items()}

    def forget(self, key: TuneKey) -> None:
        """Ignore what is stored for `key` until the next `store`. The file stays."""
        self._stored[key] = None

    def store(self, key: TuneKey, choice: TacticTable, *, on_disk: bool = True) -> None:
        """Store a choice. The file is written under another name and then renamed, so readers never see half of it."""
        self._stored[key] = choice
        if self._folder is None or not on_disk:
            return
        target = self._folder / key.file_name
        partial = target.with_suffix(f".{uuid.uuid4().hex}")  # containers that share a folder have equal process ids
        content = json.dumps({"key": dataclasses.asdict(key), "choice": choice}, indent=1)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            partial.write_text(content, encoding="utf-8")
            partial.replace(target)
        except OSError as error:
            logger.warning("tuned tactics are not kept: %s cannot be written (%s)", target, error)
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
