"""A Hugging Face Hub on this machine, as far as clients need it to find, download and stream files.

Clients use it if `HF_ENDPOINT` is its address, which they read at import, so they run in a subprocess.
"""

import hashlib
import json
import os
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Self
from urllib.parse import unquote, urlsplit


class HubServer:
    """Serves repositories: by name ("datasets/owner/name", "models/owner/name"), the content of each path.

    The name of a branch other than main may follow ("models/owner/name@step1"); the files of a `gated` repository are
    listed, but not sent.
    """

    def __init__(self, repositories: dict[str, dict[str, bytes]], gated: str | None = None) -> None:
        self.repositories, self.gated = repositories, gated
        self.bytes_served = 0  # of files; the API's answers do not count
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def environment(self, home: Path) -> dict[str, str]:
        """This process's environment, with this Hub and an empty cache in place of the user's."""
        names = ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_DATASETS_CACHE", "HF_HUB_CACHE")
        kept = {name: value for name, value in os.environ.items() if name not in names}
        return kept | {"HF_ENDPOINT": self.address, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()  # connections are refused from now on


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path).strip("/")
        api = re.fullmatch(r"api/((?:datasets|models)/[^/]+/[^/]+)(?:/(revision|tree|refs)(?:/(.+))?)?", path)
        file = re.fullmatch(r"((?:datasets/)?[^/]+/[^/]+)/resolve/(refs/\w+/\w+|[^/]+)/(.+)", path)
        name = api[1] if api else file and (file[1] if file[1].startswith("datasets/") else f"models/{file[1]}")
        if path == "api/models":  # of one author
            names = [each.removeprefix("models/") for each in self.hub.repositories if "@" not in each]
            self._send_json([{"id": each} for each in names if f"author={each.split('/')[0]}" in url.query.split("&")])
            return
        branches = {key.partition("@")[2]: key for key in self.hub.repositories if key.split("@")[0] == name}
        files, revision = self.hub.repositories.get(name or ""), (file or api or [""] * 4)[2 if file else 3]
        if len(branches) > 1 and revision:
            commits = {_commit(self.hub.repositories[key]): key for key in branches.values()}
            files = self.hub.repositories.get((branches | commits | {"main": name}).get(revision))
        if files is None:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound" if branches else "RepoNotFound"})
        elif file and name == self.hub.gated:
            told = {"X-Error-Code": "GatedRepo", "X-Error-Message": f"Access to model {file[1]} is restricted."}
            self._send(403, b"", told)
        elif file:
            self._send_file(files.get(file[3]), _commit(files))
        elif api[2] == "refs":
            refs = [
                {"name": each or "main", "ref": f"refs/heads/{each}", "targetCommit": "0" * 40} for each in branches
            ]
            self._send_json({"branches": refs, "tags": [], "converts": []})
        elif api[2] == "tree":
            folder = re.sub(r"^(refs/\w+/\w+|[^/]+)/?", "", api[3])
            self._send_json(_tree(files, folder, recursive="recursive=true" in url.query.lower()))
        else:
            siblings = [{"rfilename": path} for path in files]
            self._send_json({"id": name.split("/", 1)[1], "sha": _commit(files), "siblings": siblings, "tags": []})

    def _send_json(self, answer: object) -> None:
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _send_file(self, content: bytes | None, commit: str) -> None:
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if content is None:
            self._send(404, b"", headers | {"X-Error-Code": "EntryNotFound"})
            return
        headers["ETag"] = f'"{_oid(content)}"'
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        status, part = 200, content
        if wanted:
            begin, end = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
            status, part = 206, content[begin : end + 1]
            headers["Content-Range"] = f"bytes {begin}-{end}/{len(content)}"
        if self.command == "GET":
            self.hub.bytes_served += len(part)
        self._send(status, part, headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _commit(files: dict[str, bytes]) -> str:
    return _oid(json.dumps({path: _oid(content) for path, content in files.items()}).encode())


def _tree(files: dict[str, bytes], folder: str, recursive: bool) -> list[dict]:
    """The files and folders in a folder ("" is the root)."""
    inside = {path: content for path, content in files.items() if path.startswith(f"{folder}/" if folder else "")}
    folders = {str(parent) for path in inside for parent in PurePosixPath(path).parents} - {".", folder}
    entries = [
        {"type": "file", "path": path, "size": len(content), "oid": _oid(content)} for path, content in inside.items()
    ]
    entries += [{"type": "directory", "path": path, "size": 0, "oid": "0" * 40} for path in sorted(folders)]
    return [e for e in entries if recursive or str(PurePosixPath(e["path"]).parent) == (folder or ".")]
