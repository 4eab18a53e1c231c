"""What is told about a mistake, and what keeps its traceback."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.utils import instantiate
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import OmegaConf

from tinyformer.app.config import register_resolvers
from tinyformer.app.errors import BUG, USER_MISTAKE, describe, report
from tinyformer.app.hydra_errors import known_keys, nearest
from tinyformer.generation import Sampling

CONF = Path(__file__).parents[2] / "conf"


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
    ],
)
def test_mistakes_on_the_command_line(override, text):
    found = described(lambda: compose_with(override))
    assert found.startswith(text)
    assert "\n" not in found


def test_a_key_that_only_other_choices_have():
    found = described(lambda: compose_with("data=induction", "data.max_tokens=5"))
    assert found.startswith("data.max_tokens: there is no such key. It belongs to data=ag_news or data=docstrings or ")
    assert "induction" not in found


def test_a_key_that_every_choice_has_in_part():
    found = described(lambda: compose_with("block.attention_residual.skp=0"))
    assert found.startswith(
        "block.attention_residual.skp: there is no such key. Did you mean block.attention_residual.skip"
    )


def test_a_hint_to_quote_what_would_be_split():
    found = described(lambda: compose_with("generate.prompt=a=b=c{"))
    assert """'generate.prompt="a, b"'""" in found
    assert "expecting" not in found


def test_a_key_of_another_choice_a_letter_away():
    assert described(lambda: compose_with("task.masking.whole_word=true")).startswith(
        "task.masking.whole_word: there is no such key. Did you mean task.masking.whole_words"
    )


def test_a_value_that_is_needed_by_another():
    found = described(lambda: compose_with("data=text").datamodule.source.files)
    assert found == "data.files is needed, such as data.files=book.txt."


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


def test_our_refusals_are_told():
    assert described(lambda: Sampling(top_k=0)) == str(caught(lambda: Sampling(top_k=0)))


def test_our_refusals_inside_of_a_config_are_told():
    node = {"_target_": "tinyformer.generation.Sampling", "top_k": 0}
    assert described(lambda: instantiate(node)).startswith("top_k=0: must be at least 1")


@pytest.mark.parametrize(
    "call",
    [
        lambda: int("abc"),
        lambda: fail(ValueError("mine")),
        lambda: instantiate({"_target_": "decimal.Decimal", "value": "abc"}),
        lambda: instantiate({"_target_": "json.loads", "s": "{"}),
        lambda: 1 / 0,
        lambda: fail(KeyError("x")),
        lambda: fail(AssertionError()),
    ],
    ids=["builtin", "test", "in-a-config", "library", "zero", "key", "assert"],
)
def test_what_others_raise_is_a_bug(call):
    assert described(call) is None


def test_lightnings_own_refusals_are_told():
    assert described(lambda: fail(MisconfigurationException("so not"))) == "so not"


def test_an_error_that_was_never_raised_is_a_bug():
    assert describe(ValueError("x"), CONF, "train") is None


# Telling.


def test_a_mistake_is_told_in_four_lines_at_most(capsys):
    assert report(MisconfigurationException("1\n2\n3\n4\n5"), CONF, "train") == USER_MISTAKE == 2
    assert capsys.readouterr() == ("", "Error: 1\n2\n3\n4\n")


def test_a_mistake_with_its_traceback_on_request(capsys):
    error = caught(lambda: Sampling(top_k=0))
    assert report(error, CONF, "train", with_traceback=True) == USER_MISTAKE
    assert "Traceback" in capsys.readouterr().err


def test_a_bug_keeps_its_traceback(capsys):
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
