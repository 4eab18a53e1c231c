import pytest
import torch

from tinyformer.nn import Residual

X, UPDATE = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[10.0, 20.0]]])


@pytest.mark.parametrize(
    ("scales", "expected"),
    [
        pytest.param({}, [11.0, 22.0], id="default"),
        pytest.param({"skip": 0}, [10.0, 20.0], id="no-connection"),
        pytest.param({"branch": 0}, [1.0, 2.0], id="no-sublayer"),
        pytest.param({"skip": 2.0, "branch": 0.5}, [7.0, 14.0], id="both"),
        pytest.param({"skip": -1}, [9.0, 18.0], id="negative"),
    ],
)
def test_residual_is_skip_x_plus_branch_f(scales, expected):
    assert Residual(**scales)(X, UPDATE).flatten().tolist() == expected


def test_a_list_holds_one_number_for_each_layer():
    layers = [Residual(skip=[1, 0, 3], branch=[0, 1, 0.5], layer_index=i, num_layers=3) for i in range(3)]
    assert [layer(X, UPDATE)[0, 0, 0].item() for layer in layers] == [1, 10, 8]


def test_the_residual_stream_keeps_its_dtype():
    x, update = torch.randn(2, 3, 4).bfloat16(), torch.randn(2, 3, 4)
    out = Residual()(x, update)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, (x.float() + update).bfloat16())  # added before it is rounded
