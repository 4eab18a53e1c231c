"""The config files: every choice composes, and builds what it names."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from tinyformer.data import (
    LabelledDataModule,
    LabelledSource,
    PairDataModule,
    PairSource,
    QuestionDataModule,
    QuestionSource,
    TextDataModule,
)

CONF = Path(__file__).parents[2] / "conf"
REQUIRED = {"text": ["data.files=[a.txt,b.txt]"], "hub": ["data.path=owner/name"], "file": ["tokenizer.path=t.json"]}
RUN = [
    "+seed=3",
    "+model.max_seq_len=64",
    "+model.special_tokens={_target_:tinyformer.data.SpecialTokens}",
    "+task.labels=null",
    "+task.num_texts=null",
    "+task.masking=null",
]


def choices(group):
    return sorted(path.stem for path in (CONF / group).glob("*.yaml") if not path.stem.startswith("_"))


@pytest.fixture(scope="module")
def build():
    """Compose one choice of a group."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield lambda group, choice, *overrides: compose(
            overrides=[f"+{group}={choice}", *REQUIRED.get(choice, []), *overrides]
        )


def test_every_choice_of_data_builds_its_source_and_modules(build):
    shared = build("data", "_shared").data
    for choice in set(choices("data")) - {"induction", "recall", "copy", "modular_addition"}:
        config = build("data", choice, "+tokenizer=byte", *RUN, "data.token_dropout=0.3", "data.split_seed=4")
        assert set(shared) < set(config.data)
        assert config.data.max_tokens is None or isinstance(config.data.max_tokens, int)
        text = instantiate(config.data.module, _convert_="all")
        assert isinstance(text, TextDataModule)
        assert getattr(text.source, "seed", 4) == 4
        assert all(config.data[module].split_seed == 4 for module in ("module", "examples", "pairs", "questions"))
        if isinstance(text.source, PairSource):
            pairs = instantiate(config.data.pairs, _convert_="all")
            assert isinstance(pairs, PairDataModule)
            columns = [config.data.get(name) for name in ("source_column", "target_column")]
            with_columns = ("text", "opus_books", "cnn_dailymail", "wmt14")
            assert list(pairs.source.pair_columns) == columns or choice not in with_columns
        if isinstance(text.source, QuestionSource):
            assert isinstance(instantiate(config.data.questions, _convert_="all"), QuestionDataModule)
        if not isinstance(text.source, LabelledSource):
            continue
        examples = instantiate(config.data.examples, _convert_="all")
        assert isinstance(examples, LabelledDataModule)
        assert (examples.seq_len, examples.batch_size, examples.seed) == (64, config.data.batch_size, 3)
