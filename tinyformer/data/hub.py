"""The Hugging Face Hub: what a revision names now, and what to say when it cannot be had."""

from collections.abc import Sequence
from dataclasses import dataclass
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

_TIMEOUT = 10.0  # seconds for the one request that finds out whether the Hub can be reached


@dataclass(frozen=True)
class Wanted:
    """What is looked for on the Hub.

    Args:
        repo_type: in which part of it.
        key: what stands before a repository's name in errors: the config key, if one named it.
        offline: what works without the Hub.
    """

    repo_type: Literal["model", "dataset"]
    key: str
    offline: str


DATASET = Wanted("dataset", "data.path=", "`data=pydoc` or `data=text data.files=...` work offline")
TOKENIZER = Wanted("model", "tokenizer.path=", "`tokenizer=bpe` or `tokenizer=char` work offline")
MODEL = Wanted("model", "", "a folder on this machine works offline")


class HubUnreachableError(ValueError):
    """The Hub does not answer, and nothing that was fetched before can stand in."""


def resolve(path: str, revision: str | None, wanted: Wanted) -> str:
    """The commit that a revision (None: the main branch) of a repository stands for now.

    Raises:
        HubUnreachableError: If the Hub does not answer; after one attempt, so within seconds.
        ValueError: If there is no such repository or revision, or no access to it.
    """
    key, repo_type = f"{wanted.key}{path}", wanted.repo_type
    try:
        commit = HfApi().repo_info(path, revision=revision, repo_type=repo_type, timeout=_TIMEOUT).sha
        assert commit is not None
    except HFValidationError as error:
        raise ValueError(f"{key}: the Hub's repositories are named owner/name ({error}).") from error
    except GatedRepoError as error:
        raise ValueError(
            f"{key}: this {repo_type} is gated; accept its terms at https://huggingface.co, and run `hf auth login`."
        ) from error
    except RevisionNotFoundError as error:
        raise ValueError(f"{key}: it has no revision {revision}; leave it out for the newest one.") from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"{key}: the Hub has no such {repo_type}, or it is private; check the name at "
            "https://huggingface.co, or run `hf auth login`."
        ) from error
    except Exception as error:  # the class of a failed connection depends on huggingface_hub's version
        raise HubUnreachableError(
            f"{key}: the Hugging Face Hub cannot be reached ({error}); {wanted.offline}."
        ) from error
    return commit


def model_file(path: str, filename: str) -> Path:
    """One file of a model repository, downloaded once; without a connection, the copy of an earlier download.

    Raises:
        ValueError: If the repository or the file does not exist, or cannot be reached and was never
            downloaded.
    """
    try:
        # Asking first keeps a dead Hub quick: `hf_hub_download` alone tries for half a minute and more.
        resolve(path, None, TOKENIZER)
    except HubUnreachableError as unreachable:
        try:
            return Path(hf_hub_download(path, filename, local_files_only=True))
        except EntryNotFoundError:
            raise unreachable from None
    try:
        # The plain download (not of the commit) is the one that notes what "main" is, for the next time
        # offline.
        return Path(hf_hub_download(path, filename))
    except EntryNotFoundError as error:
        raise ValueError(
            f"tokenizer.path={path}: it holds no {filename}; tokenizer.path=openai-community/gpt2 works."
        ) from error


def model_folder(path: str, filenames: Sequence[str]) -> Path:
    """A folder with those of some files that a model repository has, each downloaded once.

    Args:
        path: the repository, "owner/name".
        filenames: as patterns.

    Raises:
        ValueError: If the repository does not exist, or cannot be reached and was never downloaded.
    """
    try:
        resolve(path, None, MODEL)
    except HubUnreachableError as unreachable:
        try:
            return Path(snapshot_download(path, allow_patterns=list(filenames), local_files_only=True))
        except EntryNotFoundError:
            raise unreachable from None
    return Path(snapshot_download(path, allow_patterns=list(filenames)))
