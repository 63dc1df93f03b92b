"""`python -m server` is the command `moe-serve`."""

import sys

from server.start import main

sys.exit(main())
