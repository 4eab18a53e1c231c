"""Every program answers `--help` and a mistyped command line before it imports what takes seconds."""

import json
import subprocess
import sys
from pathlib import Path

ANSWERS = {
    "": (0, "usage: tinyformer PROGRAM"),
    "doctr": (2, "Error: tinyformer doctr: there is no such program. Did you mean doctor?"),
    "card --help": (0, "differential"),
    "card atention=mha": (2, "Error: atention: "),
    "compare nowhere": (2, "Error: RUN=nowhere: does not exist"),
    "convert import gpt2 in.ckpt": (2, "invalid choice: 'import'"),
    "doctor --help": (0, "differential"),
    "doctor --masks=full,nonsense": (2, "nonsense: must be among full,causal,padded,causal+padded,documents"),
    "findings --help": (0, "--launcher"),
}

SCRIPT = """
import contextlib, io, json, sys
sys.modules |= dict.fromkeys(["torch", "matplotlib", "lightning"])
from tinyformer.__main__ import main
answers = {}
for line in json.loads(sys.argv[1]):
    sys.argv, said = ["tinyformer", *line.split()], io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = main()
        except SystemExit as end:  # of argparse
            code = end.code
    answers[line] = code, said.getvalue()
print(json.dumps(answers))
"""


def test_help_and_mistakes_do_not_wait_for_torch(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, json.dumps(list(ANSWERS))]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    for line, (code, said) in json.loads(ended.stdout).items():
        expected_code, expected = ANSWERS[line]
        assert (code, expected in said) == (expected_code, True), said
        assert not said.startswith("Error: ") or len(said.splitlines()) <= 4
