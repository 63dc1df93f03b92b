"""What an error of a start is about: a setting or the model's files, which must be changed, or anything else."""

from engine.errors import EngineConfigError
from loaders.errors import LoadError


def is_user_error(error: Exception) -> bool:
    """Whether a user can mend it: the error trees of the packages derive from ValueError, a bug raises it plainly."""
    return isinstance(error, OSError) or (isinstance(error, ValueError) and type(error) is not ValueError)


def is_wrong_setting(error: Exception) -> bool:
    """Whether each start with these settings and these model files ends like this, whatever becomes of the machine."""
    if isinstance(error, EngineConfigError | LoadError):
        return True
    if not is_user_error(error):
        return False
    from model.errors import ModelError  # torch, which an engine without a model need not have imported
    from moe.errors import MoeConfigError, UnsupportedPathError, WeightFormatError

    return isinstance(error, ModelError | MoeConfigError | UnsupportedPathError | WeightFormatError)
