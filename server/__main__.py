"""`python -m server` is the command `moe-serve`."""

import sys

from server.cli import main

sys.exit(main())
