"""FlashInfer writes generated sources to a cache: keep it out of the home folder."""

import os
import tempfile

os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", tempfile.mkdtemp(prefix="flashinfer-"))
