"""Files that hold one JSON object."""

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds a JSON object.

    Raises:
        ValueError: it does not.
    """
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # not UTF-8, or no JSON
        raise ValueError(f"{path} cannot be read ({error}).") from error
    if isinstance(contents, dict):
        return contents
    raise ValueError(f"{path} is no JSON object.")
