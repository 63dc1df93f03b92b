"""Runs the application of deploy/ray_serve.py in a Ray of its own, as `serve run` does, without a dashboard.

`python -m tests.ray.driver PORT NAME=VALUE...`, in Ray's environment.
"""

import signal
import sys

import ray
from ray import serve

from deploy.ray_serve import Options, app

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
    ray.init(num_cpus=1, include_dashboard=False)
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    options = Options.model_validate(dict(word.split("=", 1) for word in sys.argv[2:]))
    serve.run(app(options), name="moe-serve", blocking=True)
