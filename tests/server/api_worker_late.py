"""An HTTP process that hears late that the engine is ready. The supervisor starts it in place of `server.api_worker`.

All but the first one hold the message back until the file `let` is in the model's folder, where `held` says that it has
come.
"""

import asyncio

from engine.member import EngineMember
from server import api_worker

FIRST_ORIGIN = 1


class LateMember(EngineMember):
    def _note_ready(self, ready):
        if self._origin == FIRST_ORIGIN or (self.config.model / "let").exists():
            super()._note_ready(ready)
        else:
            (self.config.model / "held").touch()
            asyncio.get_running_loop().call_later(0.01, self._note_ready, ready)


if __name__ == "__main__":
    api_worker.EngineMember = LateMember
    api_worker.main()
