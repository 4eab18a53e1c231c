"""Pairs of a source and a target: their batches, what is too long, and files that hold no pairs."""

from pathlib import Path

import numpy as np
import pytest

from tinyformer.data import ByteTokenizer, PairFormat, Pairs, SourceDataModule, SpecialTokens, TextFiles
from tinyformer.data.batches.windows import IGNORED

EOS = ByteTokenizer().build([]).eos_id
ROWS = [("ab", "x"), ("c", "yzw"), ("defg", "v"), ("h", "u")]


def write(folder: Path, rows=ROWS, name: str = "pairs.tsv") -> str:
    path = folder / name
    path.write_text("\n".join("\t".join(row) for row in [("source", "target"), *rows]) + "\n")
    return str(path)


def prepared(folder: Path, files: str, seq_len: int = 16, tokenizer=None, **options):
    source = TextFiles(files)
    settings = {"validation_fraction": 0, "test_fraction": 0, "cache_dir": str(folder / "cache")}
    data = SourceDataModule(source, tokenizer or ByteTokenizer(), PairFormat(seq_len, **options), 2, **settings)
    data.prepare()
    return data


D, C, Y, V, W = (ord(letter) for letter in "dcyvw")


@pytest.mark.parametrize(
    ("special", "seq_len", "texts", "batch"),
    [
        (
            None,
            16,
            ("defg", "yzw", 0),
            {
                "source": [[D, D + 1, D + 2, D + 3, EOS], [C, EOS, EOS, EOS, EOS]],
                "source_lengths": [5, 2],
                "inputs": [[EOS, V, EOS, EOS], [EOS, Y, Y + 1, W]],
                "targets": [[V, EOS, IGNORED, IGNORED], [Y, Y + 1, W, EOS]],
            },
        ),
        (  # as BART's: the decoder starts with one token, and every text with another
            SpecialTokens(decoder_start=250, bos=251, eos=252),
            5,
            ("def", "yzw", 1),
            {
                "source": [[251, D, D + 1, D + 2, 252], [251, C, 252, 252, 252]],
                "source_lengths": [5, 3],
                "inputs": [[250, 251, V, 252, 252], [250, 251, Y, Y + 1, W]],
                "targets": [[251, V, 252, IGNORED, IGNORED], [251, Y, Y + 1, W, 252]],
            },
        ),
    ],
    ids=["own", "bart"],
)
def test_a_batch_holds_sources_what_the_decoder_reads_and_what_it_predicts(tmp_path, special, seq_len, texts, batch):
    split = prepared(tmp_path, write(tmp_path), seq_len, special_tokens=special).splits["train"]
    found = {name: tensor.tolist() for name, tensor in Pairs(split).__getitems__([2, 1]).items()}
    assert found == batch | {"rows": [2, 1]}
    assert (split.source(2), split.target(1), split.num_truncated) == texts
    if special is None:
        assert (split.num_documents, split.num_tokens, split.num_targets) == (4, 10, 10 + 12)


def test_pairs_longer_than_the_context(tmp_path):
    for too_long, seq_len, rows, numbers in (
        ("truncate", 4, [("ab", "x"), ("c", "yzw"), ("def", "v"), ("h", "u")], (1, 0)),
        ("skip", 3, [("ab", "x"), ("h", "u")], (0, 2)),
    ):
        split = prepared(tmp_path, write(tmp_path), seq_len, too_long=too_long).splits["train"]
        assert sorted((split.source(row), split.target(row)) for row in range(len(rows))) == sorted(rows)
        assert (split.num_documents, split.num_truncated, split.num_skipped) == (len(rows), *numbers)
        batch = Pairs(split).__getitems__([0])
        assert (batch["source"][0, -1], batch["targets"][0, -1]) == (EOS, EOS)


def test_a_pair_is_beside_pairs_of_similar_length(tmp_path):
    rows = [("a" * (1 + n % 9), "b" * (1 + n * 7 % 11)) for n in range(60)]
    data = prepared(tmp_path, write(tmp_path, rows))
    batches, evaluated = list(data.train_dataloader()), list(data.evaluation_dataloader("train"))
    padding = sum(int((batch["targets"] == IGNORED).sum()) for batch in batches)
    shuffled = np.random.default_rng(0).permutation(60).reshape(-1, 2)
    lengths = data.splits["train"].lengths[:, 1]
    assert padding < 0.5 * sum(abs(int(lengths[a]) - int(lengths[b])) for a, b in shuffled)
    longest = [max(batch["source"].shape[1], batch["inputs"].shape[1]) for batch in evaluated]
    assert longest[0] == max(longest)  # so that running out of memory shows at once
    assert longest[1:] != sorted(longest[1:], reverse=True)
