"""Reads what an offline Weights & Biases run wrote: `run-ID.wandb`, in LevelDB's log format."""

import json
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

_FILE_HEADER, _BLOCK, _RECORD_HEADER = 7, 32 * 1024, 7
_FULL, _LAST = 1, 4


def read_records(path: Path) -> list[Record]:
    """All records of a file."""
    data, position, parts, records = path.read_bytes(), _FILE_HEADER, b"", []
    while position + _RECORD_HEADER <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < _RECORD_HEADER:  # the rest of a block that is too short for a header is zeros
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += _RECORD_HEADER + length
        if position > len(data):  # wandb's service is still writing it
            break
        parts += data[position - length : position]
        if kind in (_FULL, _LAST):
            records.append(Record.FromString(parts))
            parts = b""
    return records


def read_finished(path: Path) -> list[Record]:
    """All records of a run that ends about now: wandb's service may write the end a moment after `finish`."""
    deadline = time.monotonic() + 10
    while not any(record.HasField("exit") for record in read_records(path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return read_records(path)


def nested(items: Iterable[Any]) -> dict[str, Any]:
    """The values of items with nested keys; those of later items prevail."""
    root: dict[str, Any] = {}
    for item in items:
        *outer, key = item.nested_key or [item.key]
        node = root
        for name in outer:
            node = node.setdefault(name, {})
        node[key] = json.loads(item.value_json)
    return root


def read_history(path: Path) -> list[dict[str, Any]]:
    """The rows that a finished run logged, each with its `_step`."""
    return [nested(record.history.item) for record in read_finished(path) if record.HasField("history")]


def read_config_and_summary(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration and the summary of a finished run."""
    records = read_finished(path)
    configs = [*(record.run.config for record in records), *(record.config for record in records)]
    summaries = (record.summary for record in records)
    config, summary = (nested(item for part in parts for item in part.update) for parts in (configs, summaries))
    return config, summary
