"""Tokenizer files of Hugging Face folders: each format, compared with `transformers`."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from tokenizers.implementations import BertWordPieceTokenizer, ByteLevelBPETokenizer

from interop.models import GPT2, checkpoint_of, theirs, transformers
from tinyformer.data import ByteTokenizer, TextTokenizer
from tinyformer.interop.vocabulary import read_tokenizer, tokenizer_files

TEXT = "The cat sees the birds, and Élan's mice see 12 cats. "


def read(folder: Path, fields: dict[str, Any] | None = None) -> TextTokenizer:
    tokenizer = read_tokenizer(folder, fields or {})
    assert tokenizer is not None
    return tokenizer


def test_vocab_and_merges_are_read_as_gpt2(tmp_path: Path) -> None:
    expected = ByteLevelBPETokenizer()
    expected.train_from_iterator([TEXT * 5], vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    expected.save_model(str(tmp_path))
    tokenizer = read(tmp_path)
    assert tokenizer.encode(TEXT) == expected.encode(TEXT).ids
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.eos_id == expected.token_to_id("<|endoftext|>")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_prefix_space": True}))
    tokenizer = read(tmp_path)
    assert tokenizer.encode("The cat") == tokenizer.encode(" The cat")
    (tmp_path / "tokenizer.json").write_text(ByteTokenizer().build([]).to_json())  # has precedence
    assert read(tmp_path).vocab_size == 257


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ["the", "世", "界", "elan"]),
        ({"do_lower_case": False}, ["The", "世", "界", "Élan"]),
        ({"strip_accents": False, "tokenize_chinese_chars": False}, ["the", "[UNK]", "élan"]),
    ],
)
def test_vocab_txt_is_read_as_bert(settings: dict[str, bool], expected: list[str], tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "The", "cat", "##s", "see", "'", "."]
    words += ["elan", "Élan", "élan", "世", "界"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = read(tmp_path)
    theirs = transformers().BertTokenizer.from_pretrained(tmp_path, **settings)
    assert tokenizer.encode(TEXT) == theirs(TEXT, add_special_tokens=False)["input_ids"]
    assert [words[token] for token in tokenizer.encode("The 世界 Élan")] == expected
    assert (tokenizer.eos_id, tokenizer.mask_id, tokenizer.unk_id) == (2, 4, 1)
    BertWordPieceTokenizer(str(tmp_path / "vocab.txt"), lowercase=False).save(str(tmp_path / "tokenizer.json"))
    assert read(tmp_path, {"model_type": "bert"}).encode(TEXT) == tokenizer.encode(TEXT)


LLAMA, FILE = ({"tokenizer_class": f"{name}TokenizerFast"} for name in ("Llama", "PreTrained"))
KING: dict[str, Any] = {"content": "king", "rstrip": True, "single_word": True, "special": False}
SETTINGS: list[tuple[str, dict[str, Any], dict[str, int]]] = [
    ("gpt2", {"add_prefix_space": True}, {}),
    ("gpt_neox", FILE | {"add_prefix_space": True, "mask_token": "<mask>"}, {"king": 16}),
    ("llama", FILE | {"added_tokens_decoder": {"2": KING | {"content": "<mask>"}, "15": KING}}, {"an": 16}),
    ("gpt2", FILE | {"additional_special_tokens": ["king"], "image_token": "see", "mask_token": "an"}, {}),
    ("t5", {"tokenizer_class": "T5Tokenizer"}, {}),
    *((kind, LLAMA | {"legacy": kind == "t5"}, {}) for kind in ("llama", "mistral", "t5")),
]


@pytest.mark.parametrize("case", SETTINGS, ids=range(len(SETTINGS)))
def test_settings_next_to_a_tokenizer_act_as_in_transformers(case: Any, tmp_path: Path) -> None:
    pieces = ["<s>", "</s>", "<mask>", *"Ġ▁Taceghikns'"]
    own = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    if case[1].get("tokenizer_class") == "T5Tokenizer":  # which keeps none of its parts
        own = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
        own.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    own.normalizer = normalizers.Prepend("▁")
    own.add_special_tokens(["<s>", "</s>", AddedToken("<mask>", lstrip=True)])
    own.save(str(tmp_path / "tokenizer.json"))
    files = {"config": {"model_type": case[0]}, "tokenizer_config": case[1], "added_tokens": case[2]}
    for name, contents in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(contents))
    ours, theirs = read(tmp_path, files["config"]), transformers().AutoTokenizer.from_pretrained(tmp_path)
    for text in (TEXT, " The king <mask> sees", "king's an kings king  </s>a</s> see"):
        assert ours.read([text]) == TextTokenizer.from_json(ours.to_json()).read([text]) == [theirs(text)["input_ids"]]
    assert theirs.mask_token_id in (None, TextTokenizer.from_json(ours.to_json()).for_training().mask_id)


def words(*special: str) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(special))
    return tokenizer


@pytest.mark.parametrize(
    ("special", "files", "fields", "first"),
    [
        (["</s>", "<end>"], {}, {}, "</s>"),
        (["</s>", "<end>"], {"tokenizer_config.json": {"eos_token": "<end>"}}, {}, "<end>"),
        (["</s>", "<end>"], {"special_tokens_map.json": {"eos_token": {"content": "<end>"}}}, {}, "<end>"),
        (["</s>", "<end>"], {}, {"eos_token_id": [4, 3]}, "<end>"),
        (["</s>", "<end>"], {}, {"eos_token_id": -1}, "</s>"),
        (["[SEP]", "[CLS]"], {}, {}, "[CLS]"),
        (["[SEP]", "<c>"], {"tokenizer_config.json": {"cls_token": "<c>"}}, {}, "<c>"),
    ],
)
def test_the_token_that_starts_a_text(
    special: list[str], files: dict[str, Any], fields: dict[str, Any], first: str, tmp_path: Path
) -> None:
    tokenizer = words(*special)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for name, contents in files.items():
        (tmp_path / name).write_text(json.dumps(contents))
    found = read(tmp_path, fields)
    assert found.eos_id == tokenizer.token_to_id(first)
    assert TextTokenizer.from_json(found.to_json()).eos_id == found.eos_id


def test_the_vocabulary_must_not_exceed_the_embedding(tmp_path: Path) -> None:
    folder, tokenizer = tmp_path / "model", words("</s>")
    theirs("GPT2", **GPT2, vocab_size=5).save_pretrained(folder)
    for num_tokens in (4, 5):
        tokenizer.save(str(folder / "tokenizer.json"))
        assert checkpoint_of(folder, tmp_path / f"{num_tokens}.ckpt").overrides["model.vocab_size"] == 5
        tokenizer.add_tokens([f"word-{num_tokens}"])
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(ValueError, match="the tokenizer has 6 tokens, but the model has embeddings for 5 only"):
        checkpoint_of(folder, tmp_path / "6.ckpt")


def test_a_setting_that_changes_tokens_and_is_not_applied_is_refused(tmp_path: Path) -> None:
    assert read_tokenizer(tmp_path, {}) is None  # without any files
    (tmp_path / "vocab.txt").write_text("</s>")
    (tmp_path / "tokenizer_config.json").write_text('{"split_special_tokens": 1}')
    with pytest.raises(ValueError, match="split_special_tokens=1, which changes the tokens of a text"):
        read_tokenizer(tmp_path, {})


SPECIAL = ["<s>", "</s>", "<mask>", "<pad>"]
AROUND = {"<s>": 3, "</s>": 4}


def template(single: str, pair: str) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=list(AROUND.items()))


POST_PROCESSORS = {
    "none": None,
    "bytes": processors.ByteLevel(),
    "beginning": template("<s> $A", "<s> $A $B"),
    "end": template("$A </s>", "$A </s> $B </s>"),
    "several": template("<s> </s> $A </s>", "<s> $A </s> $B"),
    "bert": processors.BertProcessing(("</s>", 4), ("<s>", 3)),
    "roberta": processors.RobertaProcessing(("</s>", 4), ("<s>", 3)),
    "sequence": processors.Sequence([processors.ByteLevel(), template("<s> $A </s>", "<s> $A </s> $B </s>")]),
}


def their_tokenizer(post_processor: str) -> Any:
    own = words(*SPECIAL)
    if processor := POST_PROCESSORS[post_processor]:
        own.post_processor = processor
    named = dict(zip(("bos_token", "eos_token", "mask_token", "pad_token"), SPECIAL, strict=True))
    return transformers().PreTrainedTokenizerFast(tokenizer_object=own, unk_token="<unk>", **named)


@pytest.mark.parametrize("name", POST_PROCESSORS)
def test_texts_are_read_and_exported_as_transformers_reads_them(name: str, tmp_path: Path) -> None:
    theirs = their_tokenizer(name)
    theirs.save_pretrained(tmp_path)
    ours = read(tmp_path)
    ours = TextTokenizer.from_json(ours.with_mask().to_json())
    files = tokenizer_files(ours, 9, dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 4), ([4], []))
    (tmp_path / "again").mkdir()
    for file, contents in files.items():
        (tmp_path / "again" / file).write_text(json.dumps(contents))
    again = transformers().AutoTokenizer.from_pretrained(tmp_path / "again")
    for text in ("a b", "b <mask> a", "<s>a</s>b<unk>c", "a", ("a", "b a")):
        given = (text,) if isinstance(text, str) else text
        assert ours.read([text]) == [theirs(*given)["input_ids"]] == [again(*given)["input_ids"]], text
    assert ours.read([""]) == [theirs("")["input_ids"] or [4]]  # a model needs a token
    # Data are encoded without; documents begin as texts do, also for a model that is trained further.
    first = theirs("")["input_ids"][:1] if name not in ("none", "bytes", "end") else [4]
    assert (ours.encode("a"), ours.start_id, ours.eos_id) == ([0], *first, 4)
    assert ours.for_training().read(["a", ("a", "b")]) == [[*first, 0], [*first, 0, *first, 1]]


@pytest.mark.parametrize("around", [([3], []), ([], [3]), ([4], [3])])
def test_our_own_texts_are_exported_as_we_read_them(around: tuple[list[int], list[int]], tmp_path: Path) -> None:
    own = words("</s>", "<s>")
    own.post_processor = processors.BertProcessing(("<s>", 4), ("<s>", 4))  # not applied to our own texts
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 3)
    files = tokenizer_files(TextTokenizer(own), 9, ids, around)
    names = ("bos_token", "eos_token", "pad_token", "cls_token", "sep_token")
    assert {files["tokenizer_config.json"][name] for name in names} == {"</s>"}
    for name, contents in files.items():
        (tmp_path / name).write_text(json.dumps(contents))
    expected = [[*around[0], 0, 1, *around[1]]]
    assert read(tmp_path).read(["a b"]) == expected
    assert [transformers().AutoTokenizer.from_pretrained(tmp_path)("a b")["input_ids"]] == expected
    assert TextTokenizer(own).read(["a b"]) == [[3, 0, 1]]
    for name in ("$A", "<end:1>"):  # which a template would read as its own
        assert TextTokenizer(words(name), name).read([("a", "b")]) == [[3, 0, 3, 1]]


OTHER_SPLIT = pre_tokenizers.Sequence(
    [pre_tokenizers.Split(Regex(r"\p{N}{1,3}|\p{L}+"), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
)


@pytest.mark.parametrize("family", ["Olmo2", "Phi3", "Qwen2", "Qwen3", "GPTJ"])
@pytest.mark.parametrize("named", [None, "GPT2Tokenizer", "Qwen2Tokenizer", "PreTrainedTokenizerFast"])
def test_the_class_of_a_tokenizer_depends_on_the_type_of_the_model(
    family: str, named: str | None, tmp_path: Path
) -> None:
    """Another pre-tokenizer than the class's is used or replaced as in `transformers`."""
    own = Tokenizer.from_str(ByteTokenizer().build([]).to_json())
    own.pre_tokenizer = OTHER_SPLIT
    own.save(str(tmp_path / "tokenizer.json"))
    settings = {"eos_token": "<|endoftext|>"} | ({} if named is None else {"tokenizer_class": named})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    config = getattr(transformers(), f"{family}Config")()
    config.save_pretrained(tmp_path)
    theirs = transformers().AutoTokenizer.from_pretrained(tmp_path)
    ours = read(tmp_path, {"model_type": config.model_type})
    for text in (TEXT, "a1234 (x):\n\n  def f(x):", " leading  spaces"):
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
