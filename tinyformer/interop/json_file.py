"""Reading JSON files."""

import json
from pathlib import Path
from typing import Any

from tinyformer.errors import ArgumentError


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ArgumentError: the file cannot be read, or contains something else.
    """
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(contents, ensure_ascii=False).encode()  # fails for half of a surrogate pair
    except (OSError, ValueError, RecursionError) as error:  # not UTF-8, no JSON, or nested too deeply
        raise ArgumentError("path", str(path), f"cannot be read as JSON ({error})") from error
    if isinstance(contents, dict):
        return contents
    raise ArgumentError("path", str(path), "is not a JSON object")
