"""Explains a failed download in one line that says what to do."""

import errno

import httpx2
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from loaders.errors import LoadError
from server.errors import SettingError, StartError, chain_of

_FULL = (errno.ENOSPC, errno.EDQUOT)
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
_WRONG_NAMES = (GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError)
_WRONG_ADDRESSES = (HFValidationError, httpx2.UnsupportedProtocol, httpx2.InvalidURL)


def explain_failure(error: BaseException, name: str, revision: str | None) -> SettingError | StartError:
    """What to tell of an error of a download of `name`: a StartError if the same order may succeed later."""
    if isinstance(error, SettingError | StartError):
        return error
    if isinstance(error, LoadError):
        return SettingError(f"--model: {error}")
    kind = SettingError if any(map(_is_refusal, chain_of(error))) else StartError
    return kind(f"--model: {_reason(error, name, revision)}")


def _is_refusal(cause: BaseException) -> bool:
    """Whether this is not a fault of the network, the hub or a full disk, which may pass."""
    if isinstance(cause, HfHubHTTPError):
        return isinstance(cause, _WRONG_NAMES) or cause.response.status_code in (401, 403)
    return isinstance(cause, (OfflineModeIsEnabled, *_WRONG_ADDRESSES)) or (
        isinstance(cause, OSError) and cause.errno in _UNWRITABLE
    )


def _reason(error: BaseException, name: str, revision: str | None) -> str:
    cache, causes = constants.HF_HUB_CACHE, chain_of(error)
    if any(isinstance(cause, OfflineModeIsEnabled) for cause in causes):
        return (
            f"HF_HUB_OFFLINE is set, and {name} is not, or not completely, in {cache}; unset it to download the model, "
            "or give a folder"
        )
    for cause in causes:
        if (told := _explain_cause(cause, name, revision)) is not None:
            return told
    if any(isinstance(cause, httpx2.TransportError | FileNotFoundError) for cause in causes):
        return (
            f"the hub at {constants.ENDPOINT} cannot be reached ({_first_line(causes[-1])}), and {name} is not, or not "
            f"completely, in {cache}; start again when it can (complete files are kept), or give a folder"
        )
    return f"the download of {name} failed ({_first_line(error)}); start again, complete files are kept"


def _explain_cause(cause: BaseException, name: str, revision: str | None) -> str | None:
    """What one error of the chain tells; None if that is nothing."""
    cache = constants.HF_HUB_CACHE
    if isinstance(cause, _WRONG_ADDRESSES):
        return _explain_address(cause, name)
    if isinstance(cause, HfHubHTTPError):
        return _explain_answer(cause, name, revision)
    if isinstance(cause, OSError) and cause.errno in _FULL:
        return f"no space is left in {cache} for {name}; free some, or set HF_HUB_CACHE to a folder on a larger disk"
    if isinstance(cause, OSError) and cause.errno in _UNWRITABLE:
        return f"{cause.filename} cannot be written ({cause.strerror}); set HF_HUB_CACHE to a folder that can"
    return None


def _explain_address(error: BaseException, name: str) -> str:
    """The reason why nothing was asked for."""
    line = _first_line(error)
    if isinstance(error, HFValidationError):
        return f"{name} cannot be the name of a model on the hub ({line}); give OWNER/NAME or a folder"
    return f"HF_ENDPOINT is {constants.ENDPOINT}, which is no address ({line}); give one with https://"


def _explain_answer(error: HfHubHTTPError, name: str, revision: str | None) -> str:
    """The reason for an error status of the hub."""
    status, page = error.response.status_code, f"{constants.ENDPOINT}/{name}"
    if isinstance(error, GatedRepoError):
        return f"{name} is gated; accept its terms at {page}, then set HF_TOKEN to a token of that account"
    if isinstance(error, RevisionNotFoundError):
        wanted = "main" if revision is None else revision
        return f"{name} has no revision '{wanted}'; give a branch, a tag or a commit of it with --revision"
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"there is no folder {name} here and no such model at {constants.ENDPOINT}, or it is private; check the "
            "name, and for a private model set HF_TOKEN"
        )
    if status in (401, 403):
        return f"the hub refuses access to {name} (status {status}); check HF_TOKEN and what it may read"
    if status == 429:
        return "the hub takes no more requests for now (status 429); start again later, or set HF_TOKEN"
    return f"the hub at {constants.ENDPOINT} fails (status {status}); start again later, complete files are kept"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
