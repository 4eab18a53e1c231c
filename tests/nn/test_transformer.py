import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nn.model_cases import make_transformer, token_ids
from tinyformer.nn import AttentionMask, RelativePosition, ShawPosition, T5Position
from tinyformer.nn.init import init_weights

CAUSAL = AttentionMask(causal=True)


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the next token."""
    return F.cross_entropy(model(ids[:, :-1], CAUSAL).flatten(0, 1), ids[:, 1:].flatten())


# Sizes.


@pytest.mark.parametrize(("tied", "expected"), [(True, 124_439_808), (False, 124_439_808 + 50_257 * 768)])
def test_gpt2_has_its_published_number_of_parameters(tied, expected):
    with torch.device("meta"):
        model = make_transformer(
            tied=tied, vocab_size=50_257, num_layers=12, d_model=768, num_heads=12, max_seq_len=1024, bias=True
        )
    assert model.num_parameters() == expected


# Initial weights.


@pytest.mark.parametrize("init_std", [None, 0.1], ids=["default", "given"])
def test_initial_weights_follow_gpt2(init_std):
    torch.manual_seed(0)
    model = make_transformer(vocab_size=500, num_layers=8, d_model=128, max_seq_len=256, bias=True, tied=False)
    if init_std is not None:
        model = type(model)(model.encoder, lambda embedding: model.readout, init_std)
    std = init_std or 0.02
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == (0 if name.endswith("bias") else 1)).all(), name
        elif name.endswith("bias"):
            assert torch.count_nonzero(parameter) == 0, name
        else:
            is_residual = "o_proj" in name or "down_proj" in name
            # √(2 · 8) = 4. The smallest matrix has 16,384 numbers: the standard error of their std is 0.6 %.
            expected = std / 4 if is_residual else std
            assert parameter.std().item() == pytest.approx(expected, rel=0.03), name
            assert abs(parameter.mean().item()) < 4 * expected / parameter.numel() ** 0.5, name


@pytest.mark.parametrize("tied", [True, False])
def test_xavier_draws_projections_as_torch_does_and_embeddings_by_their_width(tied):
    torch.manual_seed(0)
    model = make_transformer(vocab_size=500, num_layers=2, d_model=128, max_seq_len=64, bias=True, tied=tied)
    model = type(model)(model.encoder, lambda embedding: model.readout, init="xavier")
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) or (tied and name == "readout.proj"):
            assert module.weight.std().item() == pytest.approx(128**-0.5, rel=0.03), name
        elif isinstance(module, nn.Linear):
            bound = (6 / sum(module.weight.shape)) ** 0.5
            assert 0.99 * bound < module.weight.abs().max() <= bound, name
            assert module.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.03), name
            assert module.bias is None or not module.bias.any(), name
    linear = nn.Linear(9, 5)
    torch.manual_seed(1)
    init_weights(linear, num_branches=4, init="xavier")
    torch.manual_seed(1)
    assert torch.equal(linear.weight, nn.init.xavier_uniform_(torch.empty(5, 9)))


@pytest.mark.parametrize("init", ["normal", "xavier"])
@pytest.mark.parametrize("position", [lambda head_dim: T5Position(4), ShawPosition], ids=["t5", "shaw"])
def test_tables_of_relative_positions_have_the_given_deviation(position, init):
    torch.manual_seed(0)
    made = make_transformer(d_model=128, attention_position=position)
    model = type(made)(made.encoder, lambda embedding: made.readout, init_std=0.05, init=init)
    relative = [module for module in model.modules() if isinstance(module, RelativePosition)]
    tables = [part.weight for module in relative for part in module.modules() if isinstance(part, nn.Embedding)]
    assert tables
    # The smallest has 32 · 4 numbers: the standard error of their std is 6 %.
    assert [table.std().item() for table in tables] == pytest.approx([0.05] * len(tables), rel=0.25)


# Tying and the state.


def test_tied_readout_and_embedding_are_one_parameter():
    model = make_transformer()
    loss_of(model, token_ids()).backward()
    assert model.readout.proj.weight is model.encoder.token_embedding.weight
    assert sum(p.shape == (50, 32) for p in model.parameters()) == 1
    assert sum(p.shape == (50, 32) for p in make_transformer(tied=False).parameters()) == 2


def test_the_state_holds_no_positions_and_no_gates():
    model = make_transformer(position=False, ablated_heads=[[0, 1]], qk_norm=True)
    names = set(model.state_dict())
    assert names == {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert not any("head_gate.factors" in name or "cos" in name or "table" in name for name in names)
    make_transformer(position=False, qk_norm=True).load_state_dict(model.state_dict())


# Backends.


def test_different_backends_are_all_named():
    model = make_transformer(backend="eager")
    model.attentions()[1].backend = "flash"
    assert model.resolve_backends("cpu", torch.float32, CAUSAL) == "eager, flash"


def test_auto_resolves_for_the_longest_sequence(native_bf16):
    wide = {"d_model": 128, "num_heads": 2, "num_layers": 1}
    short, long = (make_transformer(**wide, max_seq_len=n) for n in (64, 1024))
    assert short.resolve_backends("cpu", torch.bfloat16, CAUSAL) == "eager"
    assert long.resolve_backends("cpu", torch.bfloat16, CAUSAL) == "sdpa"


# Training.
