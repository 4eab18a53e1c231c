"""What is told about a mistake, and what keeps its traceback."""

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.utils import instantiate
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import OmegaConf

from tinyformer.config.checks import check_early
from tinyformer.config.conf import config_dir, default_num_kv_heads, register_resolvers
from tinyformer.config.errors import BUG, USER_MISTAKE, ConfigError, describe, report
from tinyformer.config.keys import readable

CONF = config_dir()


@pytest.fixture(autouse=True)
def _resolvers():
    register_resolvers()


def compose_with(*overrides):
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base=None):
        return compose("train", overrides=list(overrides))


def described(call):
    try:
        call()
    except Exception as error:
        return describe(error, "train")
    raise AssertionError("no error")


CHOICES = "Choices: differential, gqa, mha, mla, mqa."
MISTAKES = {
    "attention=gqaa": f"attention=gqaa: there is no such choice. Did you mean gqa? {CHOICES}",
    "attention=null": "Config group override must be a string or a list. Got NoneType: an axis without a choice",
    "num_heads=3": "num_heads: there is no such key. Did you mean model.num_heads",
    "data.files=a.txt": "data.files: there is no such key. It belongs to data=squad or data=squad_v2 or data=sst2",
    "qqqqq=1": "qqqqq: there is no such key. --help lists the axes.",
    "model.d_ff=1,2": """model.d_ff=1,2: -m makes a run of each value; model.d_ff="'1,2'" is one text.""",
    "generate.prompt=cost ${5": r"generate.prompt='cost ${5': ${…} refers to another key, which is not there; "
    r"generate.prompt='cost \${5' is a text.",
    "café.x=1": "café.x=1: is no KEY=VALUE",
    "block.attention_residual.skp=0": "block.attention_residual.skp: there is no such key. Did you mean block.att",
    "~modle": "modle: there is no such key. Did you mean model",
    "~analysis": "analysis: there is no such key here; evaluate has it.",
    "analysis=heads": "analysis: there is no such key here; evaluate has it.",
}


def test_mistakes_on_the_command_line():
    for override, text in MISTAKES.items():
        found = described(lambda override=override: compose_with(*readable([override])).generate.prompt)
        assert "expecting" not in found
        assert found.startswith(text)
        assert "\n" not in found


def test_an_interpolation_that_leads_nowhere_names_its_key():
    found = described(lambda: OmegaConf.to_container(OmegaConf.create({"a": {"b": "${c.d}"}}), resolve=True))
    assert found == "c.d is needed by a.b, and the config has no such key."


@pytest.mark.parametrize("axis", ["network", "data", "callbacks"])
def test_an_axis_that_was_deleted_is_reported(axis):
    found = described(lambda: check_early(compose_with(f"~{axis}")))
    assert found.startswith(f"~{axis}: a run needs this axis; leave ~{axis} out, or choose, as in {axis}=")


def fail(error):
    raise error


OURS = {"_target_": "tinyformer.generation.sampling.Sampling", "top_k": 0}


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: instantiate(OURS), "top_k=0: must be at least 1; top_k=1 works."),
        (lambda: fail(MisconfigurationException("so not")), "so not"),
        (lambda: fail(ValueError("a bug of ours")), None),
        (lambda: instantiate({"_target_": "decimal.Decimal", "value": "abc"}), None),
    ],
    ids=["ours", "lightning", "bug", "library"],
)
def test_mistakes_are_reported_and_bugs_are_not(call, sentence):
    found = described(call)
    assert found is sentence is None or found.startswith(sentence)


def test_a_value_error_inside_this_package_is_a_bug(monkeypatch):
    monkeypatch.setattr("tinyformer.config.conf.next", lambda *found: fail(ValueError("wrong")), raising=False)
    assert described(lambda: default_num_kv_heads(4)) is None


def test_a_bug_keeps_its_traceback_and_a_mistake_shows_it_on_request(capsys):
    assert report(MisconfigurationException("1\n2\n3\n4\n5"), "train") == USER_MISTAKE == 2
    assert capsys.readouterr() == ("", "Error: 1\n2\n3\n4 …\n")
    for error, code, traceback in ((ConfigError("no"), USER_MISTAKE, True), (KeyError("x"), BUG, False)):
        assert report(error, "train", with_traceback=traceback) == code
        assert type(error).__name__ in capsys.readouterr().err
