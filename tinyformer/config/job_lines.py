"""The output of jobs that run in parallel, each line prefixed with the name of its job."""

import contextlib
import io
import sys
from collections.abc import Iterator
from typing import TextIO


class NamedLines(io.TextIOBase):
    """A stream that writes whole lines, each prefixed with a name, so that those of several processes do not mix.

    Args:
        stream: the stream to write to.
        name: the prefix of each line.
    """

    def __init__(self, stream: TextIO, name: str) -> None:
        self.stream, self.name = stream, name
        self.unfinished = ""

    def write(self, text: str) -> int:
        """Write the lines that the text ends, and keep its last, unfinished one."""
        *lines, self.unfinished = (self.unfinished + text).split("\n")
        self.stream.write("".join(f"{self.name} {line}\n" if line else "\n" for line in lines))
        self.stream.flush()
        return len(text)

    def end(self) -> None:
        """Write the unfinished line."""
        if self.unfinished:
            self.write("\n")


@contextlib.contextmanager
def named_lines(name: str) -> Iterator[None]:
    """Prefix each line that the block prints with a name."""
    out, err = NamedLines(sys.stdout, name), NamedLines(sys.stderr, name)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            yield
    finally:
        out.end()
        err.end()
