"""What is told about a mistake, and what keeps its traceback."""

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.utils import instantiate
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import OmegaConf

from tinyformer.app.config import config_dir, default_num_kv_heads, register_resolvers
from tinyformer.app.errors import BUG, USER_MISTAKE, ConfigError, describe, report
from tinyformer.app.hydra_errors import known_keys, nearest
from tinyformer.generation import Sampling

CONF = config_dir()


@pytest.fixture(autouse=True)
def _resolvers():
    register_resolvers(CONF)


def caught(call):
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("no error")


def compose_with(*overrides):
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base=None):
        return compose("train", overrides=list(overrides))


def described(call):
    return describe(caught(call), CONF, "train")


# Hydra's errors.


@pytest.mark.parametrize(
    ("override", "text"),
    [
        (
            "attention=gqaa",
            "attention=gqaa: there is no such choice. Did you mean gqa? Choices: differential, gqa, mha, mla, mqa.",
        ),
        (
            "attention=null",
            "Config group override must be a string or a list. Got NoneType: an axis without a choice is left out; "
            "--help lists the choices.",
        ),
        ("attention=zzz", "attention=zzz: there is no such choice. Choices: differential, gqa, mha, mla, mqa."),
        ("model.num_head=3", "model.num_head: there is no such key. Did you mean model.num_heads"),
        ("num_heads=3", "num_heads: there is no such key. Did you mean model.num_heads"),
        ("data.files=a.txt", "data.files: there is no such key. It belongs to data=sst2 or data=text."),
        ("atention=gqa", "atention: there is no such key. Did you mean attention"),
        ("qqqqq=1", "qqqqq: there is no such key. --help lists the axes."),
        ("generate.prompt=a, b", "Ambiguous value for argument 'generate.prompt=a, b'; quote what"),
        ("model.num_heads", "model.num_heads: "),
        ("generate.prompt=a=b=c{", "generate.prompt=a=b=c{: "),
        (
            "data=induction data.max_tokens=5",
            "data.max_tokens: there is no such key. It belongs to data=ag_news or data=docstrings or ",
        ),
        (
            "block.attention_residual.skp=0",
            "block.attention_residual.skp: there is no such key. Did you mean block.attention_residual.skip",
        ),
        (
            "task.masking.whole_word=true",
            "task.masking.whole_word: there is no such key. Did you mean task.masking.whole_words",
        ),
        ("analysis=heads", "analysis: there is no such key here; evaluate has it."),
    ],
)
def test_mistakes_on_the_command_line(override, text):
    overrides = override.split() if override.startswith("data=") else [override]
    found = described(lambda: compose_with(*overrides))
    assert "expecting" not in found
    assert found.startswith(text)
    assert "\n" not in found


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["data=text"], "data.files is needed, such as data.files=book.txt."),
        (["data=hub"], "data.path is needed, such as data.path=owner/name."),
    ],
)
def test_a_value_that_is_needed(overrides, text):
    found = described(lambda: OmegaConf.to_container(compose_with(*overrides), throw_on_missing=True))
    assert found == text


def test_an_interpolation_that_leads_nowhere_names_its_key():
    found = described(lambda: OmegaConf.to_container(OmegaConf.create({"a": {"b": "${c.d}"}}), resolve=True))
    assert "c.d" in found
    assert "a.b" in found
    assert "\n" not in found


# Whose error it is.


def fail(error):
    raise error


NODE = {"_target_": "tinyformer.generation.Sampling", "top_k": 0}


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: Sampling(top_k=0), "top_k=0: must be at least 1; top_k=1 works."),
        (lambda: instantiate(NODE), "top_k=0: must be at least 1; top_k=1 works."),
        (lambda: fail(ConfigError("a.b=1: no.")), "a.b=1: no."),
        (lambda: fail(MisconfigurationException("so not")), "so not"),
        (lambda: int("abc"), None),
        (lambda: fail(ValueError("a bug of ours")), None),
        (lambda: instantiate({"_target_": "decimal.Decimal", "value": "abc"}), None),
        (lambda: fail(KeyError("x")), None),
        (lambda: fail(AssertionError()), None),
    ],
    ids=["ours", "in-a-config", "config", "lightning", "builtin", "bug", "library", "key", "assert"],
)
def test_mistakes_are_told_and_bugs_are_not(call, sentence):
    assert described(call) == sentence


def test_a_value_error_inside_this_package_is_a_bug(monkeypatch):
    monkeypatch.setattr("tinyformer.app.config.next", lambda *found: fail(ValueError("wrong")), raising=False)
    assert described(lambda: default_num_kv_heads(4)) is None


# Telling.


def test_a_mistake_is_told_in_four_lines_at_most(capsys):
    assert report(MisconfigurationException("1\n2\n3\n4\n5"), CONF, "train") == USER_MISTAKE == 2
    assert capsys.readouterr() == ("", "Error: 1\n2\n3\n4\n")


def test_a_bug_keeps_its_traceback_and_a_mistake_shows_it_on_request(capsys):
    assert report(caught(lambda: Sampling(top_k=0)), CONF, "train", with_traceback=True) == USER_MISTAKE
    assert "Traceback" in capsys.readouterr().err
    assert report(caught(lambda: 1 / 0), CONF, "train") == BUG == 1
    assert "ZeroDivisionError" in capsys.readouterr().err


# Names.


@pytest.mark.parametrize(
    ("word", "hint"),
    [("cosin", " Did you mean cosine?"), ("ab", " Did you mean abc or abd?"), ("zzz", ""), ("", "")],
)
def test_nearest(word, hint):
    # A choice that comes twice, as a key of two files does, is named once.
    assert nearest(word, ["cosine", "abd", "abc", "cosine"]).replace("abd or abc", "abc or abd") == hint


def test_known_keys_are_groups_and_values():
    keys = known_keys(CONF, "train")
    assert {"attention", "attention.num_kv_heads", "seed", "network.encoder.block"} <= set(keys)
    assert len(keys) == len(set(keys))
