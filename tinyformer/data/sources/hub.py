"""The Hugging Face Hub: which commit a revision names now, files of models, and the cards of data sets.

The card of a data set may be untrusted, and its options choose folders that `datasets` removes and writes, and
servers that it asks; it is checked before `datasets` obeys it.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import yaml
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from tinyformer.errors import ArgumentError

_TIMEOUT = 10.0  # seconds for the one request that finds out whether the Hub can be reached


class HubUnreachableError(ArgumentError):
    """The Hub does not answer, and nothing was downloaded before."""


def resolve(path: str, revision: str | None, repo_type: Literal["model", "dataset"]) -> str:
    """The commit that a revision (None: the main branch) of a repository names now.

    That the Hub does not answer is found out within seconds, after one attempt.
    """
    if repo_type == "dataset" and Path(path).exists():
        reason = "is also a folder here, which `datasets` would read in place of the Hub's; change to another folder"
        raise ArgumentError("path", path, reason)
    try:
        commit = HfApi().repo_info(path, revision=revision, repo_type=repo_type, timeout=_TIMEOUT).sha
        assert commit is not None
    except (HFValidationError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        problem = " ".join(str(error).split())
        raise ArgumentError("path", path, f"the Hub has no such {repo_type} for you ({problem})") from error
    except Exception as error:  # the class of a failed connection depends on huggingface_hub's version
        reason = f"the Hugging Face Hub cannot be reached ({error}); local files work without a network"
        raise HubUnreachableError("path", path, reason) from error
    return commit


def model_file(path: str, filename: str) -> Path:
    """One file of a model repository, downloaded once; without a network, the copy of an earlier download."""
    try:
        # The plain download (not of the commit) also records what "main" is, for later use offline.
        return _downloaded(path, partial(hf_hub_download, path, filename))
    except EntryNotFoundError as error:
        works = {"path": "openai-community/gpt2"}
        raise ArgumentError("path", path, f"this repository has no {filename}", works) from error


def model_folder(path: str, patterns: Sequence[str]) -> Path:
    """A folder with the files of a model repository whose names match some patterns, each downloaded once."""
    return _downloaded(path, partial(snapshot_download, path, allow_patterns=list(patterns)))


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


# Cards of data sets.

CARDS = ("README.md", ".huggingface.yaml")
"""The files of a repository that `datasets` takes options from."""

HARMLESS = ("default", "description", "sep", "delimiter", "quotechar", "encoding", "field")
"""The options of a configuration that are followed whatever their values."""

NAMES = {"config_name": r"[\w.+ -]*[\w+]", "version": r"\d+\.\d+\.\d+"}
"""Options that become the names of folders, each with the values that it may have."""

PATHS = ("data_files", "data_dir")
"""Options that name files of the repository."""


def require_plain_card(path: str, commit: str) -> None:
    """Refuse a data set whose card cannot be read, or asks for more than files of its own repository."""
    for name in CARDS:
        try:
            problem = _problem(_options(Path(hf_hub_download(path, name, repo_type="dataset", revision=commit))))
        except RemoteEntryNotFoundError:  # the file does not exist; that the Hub does not answer is another error
            continue
        except (OSError, HfHubHTTPError, ValueError, yaml.YAMLError) as error:
            raise _refused(path, f"its {name} cannot be read ({' '.join(str(error).split())[:200]})") from error
        if problem:
            raise _refused(path, f"its {name} {problem}")


def _refused(path: str, problem: str) -> ArgumentError:
    return ArgumentError("path", path, f"{problem}; download the files, and choose data=text")


def _options(file: Path) -> Any:
    """The contents of a card; a README has them between two lines of dashes, at its beginning."""
    # As the libraries read it: with its line ends unchanged, and by the loader that they use.
    text = file.read_bytes().decode("utf-8-sig")
    if file.suffix == ".md":
        block = REGEX_YAML_BLOCK.search(text)
        text = block[2] if block else ""
    if "\ufeff" in text:
        raise ValueError("a byte-order mark inside")
    return yaml.safe_load(text)


def _problem(card: Any) -> str | None:
    """The reason why a card is refused, as in "has the option engine=python"; None if it is not."""
    configs = card.get("configs") if isinstance(card, dict) else None
    if not isinstance(configs, list | None) or not all(isinstance(config, dict) for config in configs or ()):
        return "has no list of configurations"
    for config in configs or ():
        for name, value in config.items():
            is_name = name in NAMES and (value is None or re.fullmatch(NAMES[name], str(value)))
            if name not in HARMLESS and not is_name and not (name in PATHS and all(map(_is_own_file, _texts(value)))):
                return f"has the option {str(name)[:50]}={str(value)[:100]!r}, which is not followed"
    return None


def _texts(value: Any) -> Iterator[str]:
    """The texts of a list or a mapping, or the text itself."""
    for entry in value if isinstance(value, list) else value.values() if isinstance(value, dict) else ():
        yield from _texts(entry)
    if not isinstance(value, list | dict):
        yield str(value)


def _is_own_file(pattern: str) -> bool:
    """Return True if a pattern stays in the repository: it has no root, server, chain of file systems or parent."""
    is_elsewhere = pattern.startswith(("/", "~")) or ":" in pattern or "\\" in pattern
    return not is_elsewhere and ".." not in pattern.split("/")
