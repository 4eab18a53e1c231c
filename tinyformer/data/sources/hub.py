"""The Hugging Face Hub: which commit a revision names now, and files of models."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tinyformer.errors import ArgumentError

_TIMEOUT = 10.0  # seconds for the one request that finds out whether the Hub can be reached


class HubUnreachableError(ArgumentError):
    """The Hub does not answer, and nothing was downloaded before."""


def resolve(path: str, revision: str | None, repo_type: Literal["model", "dataset"]) -> str:
    """The commit that a revision (None: the main branch) of a repository names now.

    Raises:
        HubUnreachableError: the Hub does not answer; raised after one attempt, so within seconds.
        ArgumentError: the repository or the revision does not exist, or access is denied.
    """
    if repo_type == "dataset" and Path(path).exists():
        reason = "is also a folder here, which `datasets` would read in place of the Hub's; change to another folder"
        raise ArgumentError("path", path, reason)
    try:
        commit = HfApi().repo_info(path, revision=revision, repo_type=repo_type, timeout=_TIMEOUT).sha
        assert commit is not None
    except HFValidationError as error:
        raise ArgumentError("path", path, f"not a repository's name, such as owner/name ({error})") from error
    except GatedRepoError as error:
        raise gated(path, repo_type) from error
    except RevisionNotFoundError as error:
        raise ArgumentError("revision", revision, f"{path} has no such revision", {"revision": None}) from error
    except RepositoryNotFoundError as error:
        reason = (
            f"this {repo_type} does not exist on the Hub, or is private; check the name at https://huggingface.co, or "
            "run `hf auth login`"
        )
        raise ArgumentError("path", path, reason) from error
    except Exception as error:  # the class of a failed connection depends on huggingface_hub's version
        reason = f"the Hugging Face Hub cannot be reached ({error}); local files work without a network"
        raise HubUnreachableError("path", path, reason) from error
    return commit


def gated(path: str, repo_type: str) -> ArgumentError:
    """The error of a repository whose terms the user has not accepted."""
    reason = f"this {repo_type} is gated; accept its terms at https://huggingface.co, and run `hf auth login`"
    return ArgumentError("path", path, reason)


def model_file(path: str, filename: str) -> Path:
    """One file of a model repository, downloaded once; without a network, the copy of an earlier download.

    Raises:
        ArgumentError: the repository or the file does not exist, or cannot be reached and was never downloaded.
    """
    try:
        # The plain download (not of the commit) also records what "main" is, for later use offline.
        return _downloaded(path, partial(hf_hub_download, path, filename))
    except EntryNotFoundError as error:
        works = {"path": "openai-community/gpt2"}
        raise ArgumentError("path", path, f"this repository has no {filename}", works) from error


def model_folder(path: str, filenames: Sequence[str]) -> Path:
    """A folder with the files of a model repository that match some patterns, each downloaded once.

    Args:
        path: the repository, "owner/name".
        filenames: the patterns.

    Raises:
        ArgumentError: the repository does not exist, or cannot be reached and was never downloaded.
    """
    return _downloaded(path, partial(snapshot_download, path, allow_patterns=list(filenames)))


def _downloaded(path: str, download: Callable[..., str]) -> Path:
    try:
        # Asking first keeps an unreachable Hub quick: `hf_hub_download` alone tries for half a minute and more.
        resolve(path, None, "model")
    except HubUnreachableError as unreachable:
        try:
            return Path(download(local_files_only=True))
        except EntryNotFoundError:
            raise unreachable from None
    return Path(download())
