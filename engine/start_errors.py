"""What an error of a start is about: a setting or the model's files, which must be changed, or anything else."""

import errno
import sys

from engine.errors import EngineConfigError
from loaders.errors import LoadError

# Errors of modules that import torch. One of theirs is only raised once they are here, and torch may be what fails.
_SETTING_ERRORS = {
    "model.errors": ("ModelError",),
    "moe.errors": ("MoeConfigError", "UnsupportedPathError", "WeightFormatError"),
}
_WRONG_PATHS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG)


def is_user_error(error: Exception) -> bool:
    """Whether a user can mend it: the error trees of the packages derive from ValueError, a bug raises it plainly."""
    return isinstance(error, OSError) or (isinstance(error, ValueError) and type(error) is not ValueError)


def is_wrong_setting(error: Exception) -> bool:
    """Whether each start with these settings and these model files ends like this, whatever becomes of the machine."""
    if _is_failed_read(error):
        return False
    kinds = [
        getattr(sys.modules[module], name)
        for module, names in _SETTING_ERRORS.items()
        if module in sys.modules
        for name in names
    ]
    return isinstance(error, (EngineConfigError, LoadError, *kinds))


def _is_failed_read(error: BaseException) -> bool:
    """Whether a file that is there could not be read, which may pass: its network file system is away, say."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__
    return cause is not None and cause.errno not in _WRONG_PATHS
