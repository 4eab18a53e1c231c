"""The card of a data set on the Hub, which is checked before `datasets` obeys it.

A card may come from a stranger, and its options choose folders that `datasets` removes and writes, and servers that it
asks.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RemoteEntryNotFoundError
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from tinyformer.data.sources import hub
from tinyformer.errors import ArgumentError
from tinyformer.plain_yaml import load_plain_yaml

FILES = ("README.md", ".huggingface.yaml")
"""The files of a repository that `datasets` takes options from."""

MAX_BYTES = 1_000_000
"""Maximum size of such a file."""

OPTIONS = {
    "config_name": r"[\w.+ -]*[\w+]",
    "default": r"true|True|false|False",
    "description": r"(?s).*",
    "version": r"\d+\.\d+\.\d+",
    "sep": r".",
    "delimiter": r".",
    "quotechar": r".",
    "encoding": r"[\w-]+",
    "field": r"\w+",
}
"""The options of a configuration that are followed, besides those of `PATHS`, each with the values that it may have."""

PATHS = ("data_files", "data_dir")
"""Options that name files of the repository."""


def require_plain_card(path: str, commit: str) -> None:
    """Refuse a data set whose card asks for more than files of its own repository.

    Args:
        path: the repository, "owner/name".
        commit: its commit.

    Raises:
        ArgumentError: a configuration has an option or a value that is not followed, or the card cannot be read.
    """
    for name in FILES:
        try:
            problem = _problem(_options(Path(hf_hub_download(path, name, repo_type="dataset", revision=commit))))
        except RemoteEntryNotFoundError:  # the file does not exist; that the Hub does not answer is another error
            continue
        except GatedRepoError as error:
            raise hub.gated(path, "dataset") from error
        except (OSError, HfHubHTTPError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise _refused(path, f"its {name} cannot be read ({' '.join(str(error).split())[:200]})") from error
        if problem:
            raise _refused(path, f"its {name} {problem}")


def _options(file: Path) -> Any:
    """What a card says; a README says it between two lines of dashes, at its beginning."""
    if file.stat().st_size > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES:,} bytes")
    # As the libraries read it: with its line ends unchanged, and by the loader that they use.
    text = file.read_bytes().decode("utf-8-sig")
    if file.suffix == ".md":
        block = REGEX_YAML_BLOCK.search(text)
        text = block[2] if block else ""
    if "\ufeff" in text:
        raise ValueError("a byte-order mark inside")
    return load_plain_yaml(text, yaml.SafeLoader)


def _problem(card: Any) -> str | None:
    """Why a card is refused, as in "has the option engine=python"; None if it is not."""
    configs = card.get("configs") if isinstance(card, dict) else None
    if not isinstance(configs, list | None) or not all(isinstance(config, dict) for config in configs or ()):
        return "has no list of configurations"
    for config in configs or ():
        for name, value in config.items():
            is_option = name in OPTIONS and isinstance(value, str | bool | None)
            is_plain = is_option and (value is None or re.fullmatch(OPTIONS[name], str(value)))
            if not is_plain and not (name in PATHS and all(map(_is_own_file, _texts(value)))):
                return f"has the option {str(name)[:50]}={str(value)[:100]!r}, which is not followed"
    return None


def _texts(value: Any) -> Iterator[str]:
    """The texts of a list or a mapping, or the text itself."""
    for entry in value if isinstance(value, list) else value.values() if isinstance(value, dict) else ():
        yield from _texts(entry)
    if not isinstance(value, list | dict):
        yield str(value)


def _is_own_file(pattern: str) -> bool:
    """Whether a pattern stays in the repository: no absolute path, other server, chain of file systems, or parent."""
    is_elsewhere = pattern.startswith(("/", "~")) or ":" in pattern or "\\" in pattern
    return not is_elsewhere and ".." not in pattern.split("/")


def _refused(path: str, problem: str) -> ArgumentError:
    return ArgumentError("path", path, f"{problem}; download the files, and choose data=text")
