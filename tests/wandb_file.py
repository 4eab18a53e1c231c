"""Reads what an offline Weights & Biases run wrote: `run-ID.wandb`, in LevelDB's log format."""

import json
import struct
import time
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
        position += _RECORD_HEADER
        if position + length > len(data):  # wandb's service is still writing it
            break
        parts += data[position : position + length]
        position += length
        if kind in (_FULL, _LAST):
            records.append(Record.FromString(parts))
            parts = b""
    return records


def read_history(path: Path) -> list[dict[str, Any]]:
    """The rows that a finished run logged, each with its `_step`."""
    rows, deadline = [], time.monotonic() + 10
    # wandb's service may write the end of the file a moment after `finish`.
    while not any(record.HasField("exit") for record in read_records(path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for record in read_records(path):
        if record.WhichOneof("record_type") == "history":
            row: dict[str, Any] = {}
            for item in record.history.item:
                *outer, key = item.nested_key or [item.key]
                node = row
                for name in outer:
                    node = node.setdefault(name, {})
                node[key] = json.loads(item.value_json)
            rows.append(row)
    return rows
