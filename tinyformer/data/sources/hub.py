"""The Hugging Face Hub: the current commit of a revision, files of models, and the cards of data sets.

The card of a data set may be untrusted. Its options choose folders that `datasets` removes and writes, and servers that
`datasets` contacts. So the card is checked before `datasets` loads the data set.
"""

import contextlib
import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import yaml
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from tinyformer.errors import ArgumentError

_TIMEOUT = 10.0  # seconds that the request for a commit may take


class HubUnreachableError(ArgumentError):
    """The Hugging Face Hub cannot be reached, and the cache has no earlier download of the requested files."""


def resolve(path: str, revision: str | None, repo_type: Literal["model", "dataset"]) -> str:
    """The current commit of a revision (None: the main branch) of a repository on the Hub.

    If the Hub cannot be reached, a `HubUnreachableError` is raised within seconds, after one attempt.
    """
    if repo_type == "dataset" and Path(path).exists():
        reason = "is also a folder here, and `datasets` would load it, not the Hub's data; run in another folder"
        raise ArgumentError("path", path, reason)
    absent = "" if repo_type == "dataset" or Path(path).exists() else "is no file or folder here, and "
    try:
        commit = HfApi().repo_info(path, revision=revision, repo_type=repo_type, timeout=_TIMEOUT).sha
        assert commit is not None
    except RevisionNotFoundError as error:
        refs = HfApi().list_repo_refs(path, repo_type=repo_type)
        names = [ref.name for ref in (*refs.branches, *refs.tags)]
        near = ", ".join(difflib.get_close_matches(str(revision), names, n=5, cutoff=0))
        reason = f"{path} has no such commit, and none of its {len(names)} branches and tags has this name: {near}"
        raise ArgumentError("revision", revision, reason) from error
    except (HFValidationError, RepositoryNotFoundError) as error:
        reason = f"{absent}the Hub has no such {repo_type} that you can access ({' '.join(str(error).split())})"
        if repo_type == "model" and isinstance(error, RepositoryNotFoundError):
            reason += _existing(path)
        raise ArgumentError("path", path, reason) from error
    except Exception as error:  # the class of a failed connection depends on huggingface_hub's version
        reason = f"{absent}the Hugging Face Hub cannot be reached ({error}); local files work without a network"
        raise HubUnreachableError("path", path, reason) from error
    return commit


def _existing(path: str) -> str:
    """The owner's models with names like that of `path`, as the end of a sentence; empty if there are none."""
    owner, near = path.partition("/")[0], []
    with contextlib.suppress(HfHubHTTPError):  # a mirror of the Hub need not list models
        names = [model.id for model in HfApi().list_models(author=owner, limit=1000)]
        near = difflib.get_close_matches(path, names, n=3, cutoff=0)
    return f"; {owner} has {', '.join(near)}" if near else ""


def model_file(path: str, filename: str) -> Path:
    """The path of one file of a model repository, downloaded once; without a network, that of an earlier download."""
    try:
        # The plain download (not of the commit) also records what "main" is, for later use offline.
        return _downloaded(path, partial(hf_hub_download, path, filename))
    except EntryNotFoundError as error:
        works = {"path": "openai-community/gpt2"}
        raise ArgumentError("path", path, f"this repository has no {filename}", works) from error


def model_folder(path: str, patterns: Sequence[str], revision: str | None = None) -> Path:
    """A folder, named after the commit, with a model's files that match one of the patterns; each is downloaded once.

    Without a network, it is the commit of an earlier download of this revision (None: the main branch).
    """
    download = partial(snapshot_download, path, revision=revision, allow_patterns=list(patterns))
    return _downloaded(path, download, revision)


def _downloaded(path: str, download: Callable[..., str], revision: str | None = None) -> Path:
    try:
        # `resolve` first, since it fails fast: `hf_hub_download` tries to reach the Hub for half a minute and more.
        resolve(path, revision, "model")
    except HubUnreachableError as unreachable:
        try:
            return Path(download(local_files_only=True))
        except EntryNotFoundError:
            raise unreachable from None
    try:
        return Path(download())
    except GatedRepoError as error:  # which everyone can see, but not download
        raise ArgumentError("path", path, " ".join(str(error).split()).rstrip(".")) from error


# Cards of data sets.

CARDS = ("README.md", ".huggingface.yaml")
"""The files of a repository that `datasets` takes options from."""

HARMLESS = ("default", "description", "sep", "delimiter", "quotechar", "encoding", "field")
"""The options of a configuration that are accepted with any value."""

NAMES = {"config_name": r"[\w.+ -]*[\w+]", "version": r"\d+\.\d+\.\d+"}
"""Options that become names of folders, with a regular expression of the accepted values."""

PATHS = ("data_files", "data_dir")
"""Options that name files of the repository."""


def require_plain_card(path: str, commit: str) -> None:
    """Refuse a data set whose card cannot be parsed, or has options that reach beyond the files of its repository."""
    for name in CARDS:
        try:
            problem = _problem(_options(Path(hf_hub_download(path, name, repo_type="dataset", revision=commit))))
        except RemoteEntryNotFoundError:  # the file does not exist; an unreachable Hub raises another error
            continue
        except (OSError, HfHubHTTPError, ValueError, yaml.YAMLError) as error:
            raise _refused(path, f"its {name} cannot be read ({' '.join(str(error).split())[:200]})") from error
        if problem:
            raise _refused(path, f"its {name} {problem}")


def _refused(path: str, problem: str) -> ArgumentError:
    return ArgumentError("path", path, f"{problem}; download the files, and load them with data=text")


def _options(file: Path) -> Any:
    """The parsed YAML of a card; in a README, it is between two lines of dashes at the beginning."""
    # As `datasets` and `huggingface_hub` parse it: line ends are unchanged, and the YAML loader is the same.
    text = file.read_bytes().decode("utf-8-sig")
    if file.suffix == ".md":
        block = REGEX_YAML_BLOCK.search(text)
        text = block[2] if block else ""
    if "\ufeff" in text:
        raise ValueError("it contains a byte-order mark")
    return yaml.safe_load(text)


def _problem(card: Any) -> str | None:
    """The reason to refuse a card, as in "has the option engine='python', which …"; None if the card is accepted."""
    configs = card.get("configs") if isinstance(card, dict) else None
    if not isinstance(configs, list | None) or not all(isinstance(config, dict) for config in configs or ()):
        return "has no list of configurations"
    for config in configs or ():
        for name, value in config.items():
            is_name = name in NAMES and (value is None or re.fullmatch(NAMES[name], str(value)))
            if name not in HARMLESS and not is_name and not (name in PATHS and all(map(_is_own_file, _texts(value)))):
                return f"has the option {str(name)[:50]}={str(value)[:100]!r}, which is not supported"
    return None


def _texts(value: Any) -> Iterator[str]:
    """All strings in nested lists and mappings; a value that is neither is converted to a string."""
    for entry in value if isinstance(value, list) else value.values() if isinstance(value, dict) else ():
        yield from _texts(entry)
    if not isinstance(value, list | dict):
        yield str(value)


def _is_own_file(pattern: str) -> bool:
    """Return True if a pattern cannot leave the repository: it has no root, URL, chained file system or parent."""
    is_elsewhere = pattern.startswith(("/", "~")) or ":" in pattern or "\\" in pattern
    return not is_elsewhere and ".." not in pattern.split("/")
