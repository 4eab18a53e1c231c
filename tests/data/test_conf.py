"""The config files of data: every choice composes, and builds what it names."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from tinyformer.data import ExampleFormat, PairFormat, QuestionFormat, SourceDataModule, WindowFormat
from tinyformer.data.sources.source import rows_of

CONF = Path(__file__).parents[2] / "conf"
REQUIRED = {"text": ["data.files=[a.txt,b.txt]"], "hub": ["data.path=owner/name"]}
FORMATS = {"module": WindowFormat, "examples": ExampleFormat, "pairs": PairFormat, "questions": QuestionFormat}
RUN = ["+tokenizer=byte", "+seed=3", "+model.max_seq_len=64", "data.token_dropout=0.3", "data.split_seed=4"]
RUN += ["+model.special_tokens={_target_:tinyformer.data.SpecialTokens}"]
RUN += [f"+task.{name}=null" for name in ("labels", "num_texts", "masking")]
CHOICES = {path.stem for path in (CONF / "data").glob("*.yaml")} - {"_shared"}
GENERATED = {"induction", "recall", "copy", "modular_addition", "agreement"}


@pytest.mark.parametrize("choice", sorted(CHOICES - GENERATED))
def test_every_choice_of_data_builds_its_source_and_modules(choice):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        shared = compose(overrides=["+data=_shared"]).data
        config = compose(overrides=[f"+data={choice}", *REQUIRED.get(choice, []), *RUN])
    assert set(shared) < set(config.data)
    source = instantiate(config.data.source, _convert_="all")
    assert getattr(source, "seed", 4) == 4
    for node, kind in FORMATS.items():
        if kind.source_rows in rows_of(source):
            data = instantiate(config.data[node], _convert_="all")
            assert (type(data), type(data.row_format)) == (SourceDataModule, kind)
            settings = data.seq_len, data.batch_size, data.seed, data.split_seed
            assert settings == (64, config.data.batch_size, 3, 4)
    if choice in ("text", "opus_books", "cnn_dailymail", "wmt14"):
        assert source.pair_columns == (config.data.source_column, config.data.target_column)
