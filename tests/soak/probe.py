"""Asks for liveness ten times a second, in a process of its own, so that only the service's delays are measured.

`python -m tests.soak.probe URL` goes on until its standard input closes, then prints what it saw as JSON.
"""

import http.client
import json
import select
import subprocess
import sys
import time
from types import TracebackType

_INTERVAL_S = 0.1


class LivenessProbe:
    """`with LivenessProbe(url) as probe: ...`; afterwards `seconds` has the time of each answer."""

    def __init__(self, url: str) -> None:
        self._command = [sys.executable, "-m", "tests.soak.probe", url]
        self.seconds: list[float] = []
        self.failures: list[str] = []

    def __enter__(self) -> "LivenessProbe":
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seen = json.loads(self._process.communicate()[0])
        self.seconds, self.failures = seen["seconds"], seen["failures"]


def probe(address: str) -> None:
    """CheckCase until standard input closes."""
    seconds, failures = [], []
    connection = http.client.HTTPConnection(address, timeout=60)
    while not select.select([sys.stdin], [], [], _INTERVAL_S)[0]:
        start_s = time.monotonic()
        try:
            connection.request("GET", "/health/live")
            response = connection.getresponse()
            response.read()
        except (OSError, http.client.HTTPException) as error:
            failures.append(repr(error))
            connection.close()
            continue
        seconds.append(time.monotonic() - start_s)
        if response.status != 200:
            failures.append(f"liveness: status {response.status}")
    json.dump({"seconds": seconds, "failures": failures}, sys.stdout)


if __name__ == "__main__":
    probe(sys.argv[1].removeprefix("http://"))
