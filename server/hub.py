"""Downloads a model from the hub in a separate process (`server.hub_download`).

So a signal ends the service at once, whatever the library's threads are waiting for, and the service never imports the
library. The process ends when its standard input closes, which happens when the service is gone.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Literal

from engine.logs import LogFormat
from server.errors import SettingError, StartError
from server.model_source import HubModel

_BOOT = "import runpy, sys; sys.path[:] = sys.argv[2:]; runpy.run_module(sys.argv[1], run_name='__main__')"
_MODULE = "server.hub_download"
Needs = Literal["config", "tokenizer", "weights"]  # each includes the one before


def download(
    model: HubModel, *, needs: Needs = "weights", log_level: str = "info", log_format: LogFormat = "text"
) -> Path:
    """Download what is needed and return the model's folder in the hub's cache; progress goes to standard error.

    Raises:
        SettingError: the hub refuses, or the model cannot be served; one line that says what to do.
        StartError: the hub cannot be reached or fails, or the disk is full; likewise.
    """
    order = {
        "name": model.name,
        "revision": model.revision,
        "needs": needs,
        "log_level": log_level,
        "log_format": log_format,
    }
    command = [sys.executable, "-P", "-c", _BOOT, _MODULE, *sys.path]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the download has no standard input or output")
        try:
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BaseException:
            process.kill()
            raise
    if not answer:
        raise StartError(f"--model: the download of {model} ended with status {process.returncode}; start again")
    result = json.loads(answer)
    if "error" in result:
        raise (SettingError if result["is_setting"] else StartError)(result["error"])
    return Path(result["folder"])
