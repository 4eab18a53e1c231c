"""Every program answers `--help` and a mistyped command line before it imports what takes seconds."""

from pathlib import Path

from commands import spawned, without

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


def test_help_and_mistakes_do_not_wait_for_torch(tmp_path: Path) -> None:
    answers = spawned(list(ANSWERS), tmp_path, without("torch", "matplotlib", "lightning"))
    for (code, words), ended in zip(ANSWERS.values(), answers, strict=True):
        assert (ended.code, words in ended.out + ended.err) == (code, True), ended
        assert not ended.err.startswith("Error: ") or len(ended.err.splitlines()) <= 4
