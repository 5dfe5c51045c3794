"""Asking the Hub: what a repository holds, and what its refusals mean for the person who asked.

`huggingface_hub` knows where the Hub is (HF_ENDPOINT), who asks (HF_TOKEN, or the file that a login wrote)
and how the Hub words an error; it is imported here and in `transfer.py` alone, by the pull's own process. A
token goes into request headers and nowhere else.
"""

from __future__ import annotations

import httpx2
from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from mlxpool.shared.staging import PullError

from .plan import RemoteFile

# The Hub lists a repository within a second; a network that takes longer than this is no network.
LOOK_UP_TIMEOUT_S = 30.0


def list_files(repository: str, revision: str | None) -> tuple[str, list[RemoteFile]]:
    """The commit that a revision is now, and its files. Raises PullError."""
    try:
        info = HfApi(library_name="mlxpool").model_info(
            repository, revision=revision, files_metadata=True, timeout=LOOK_UP_TIMEOUT_S
        )
    except (httpx2.HTTPError, OSError) as problem:
        raise explain(problem, repository, revision) from None
    except (ValueError, TypeError, KeyError, AttributeError):
        # A login page of a network, or a proxy's, answers 200 with what it likes.
        raise PullError(
            f"{constants.ENDPOINT} answers, but not as the Hub does; check the network (does it want a"
            " login?) and, where it is set, HF_ENDPOINT"
        ) from None
    files = []
    for file in info.siblings or []:
        if file.size is None or file.blob_id is None:
            raise PullError(f"the Hub does not say how large {file.rfilename} of {repository} is; try again")
        sha256 = file.lfs.sha256 if file.lfs is not None else None
        files.append(RemoteFile(file.rfilename, file.size, sha256, file.blob_id))
    if info.sha is None:
        raise PullError(f"the Hub names no commit for {repository}; try again")
    return info.sha, files


def explain(problem: Exception, repository: str, revision: str | None = None) -> PullError:
    """A failed request as one sentence that says what to do."""
    page = f"{constants.ENDPOINT}/{repository}"
    has_token = get_token() is not None
    if isinstance(problem, GatedRepoError):
        account = "the account of your token" if has_token else "your account"
        token = "" if has_token else ", set HF_TOKEN to a token of it (or run `hf auth login`)"
        return PullError(
            f"{repository} is gated: accept its licence at {page} with {account}{token} and pull again"
        )
    if isinstance(problem, RepositoryNotFoundError):
        unseen = (
            "your token may not see it"
            if has_token
            else "set HF_TOKEN to a token that may see it (or run `hf auth login`)"
        )
        return PullError(
            f"there is no model {repository} at {constants.ENDPOINT}; if it is private, {unseen}"
        )
    if isinstance(problem, RevisionNotFoundError):
        return PullError(f"{repository} has no revision {revision!r}; {page}/tree/main lists those there are")
    if isinstance(problem, RemoteEntryNotFoundError):
        return PullError(f"{repository} has just been changed at the Hub; pull again")
    if isinstance(problem, OfflineModeIsEnabled):
        return PullError("HF_HUB_OFFLINE forbids to ask the Hub; unset it and pull again")
    if isinstance(problem, HfHubHTTPError):
        return _explain_status(problem, repository)
    if isinstance(problem, httpx2.HTTPError):
        said = _one_line(str(problem)) or type(problem).__name__
        return PullError(
            f"{constants.ENDPOINT} can't be reached ({said}); check the network, and HF_ENDPOINT where it is"
            " set. What has been fetched is kept"
        )
    return PullError(f"{repository} could not be fetched: {_one_line(str(problem))}")


def _explain_status(problem: HfHubHTTPError, repository: str) -> PullError:
    status, said = problem.response.status_code, _one_line(problem.server_message or "")
    if status == 401:
        return PullError(
            "the Hub does not accept your token; set HF_TOKEN to a valid one, or run `hf auth login` again"
        )
    if status == 403:
        return PullError(f"the Hub refuses {repository}: {said or 'your token may not read it'}")
    if status == 429:
        return PullError("the Hub asks to wait (429, too many requests); pull again in some minutes")
    return PullError(
        f"the Hub answered {status} for {repository}{f': {said}' if said else ''}; pull again later"
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())
