import warnings

import pytest
import torch
from torch import nn

from commands import InputError
from training.precision import Precision, compile_backbone

CPU = torch.device("cpu")


@pytest.mark.parametrize("name, dtype", [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_products_run_in_the_named_format_and_nothing_is_scaled_on_a_cpu(name, dtype):
    precision = Precision(name, CPU)
    with precision.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is dtype
    assert not precision.scaler.is_enabled()
    assert precision.scaler.scale(torch.tensor(3.0)) == 3


def test_float16_without_cuda_says_what_to_use():
    with pytest.raises(InputError, match="float16.*needs CUDA.*bfloat16 or float32"):
        Precision("float16", CPU)


def test_a_backbone_that_cannot_be_compiled_runs_as_written_after_one_warning():
    backbone = nn.Linear(3, 3)

    def trial():
        raise RuntimeError("InvalidCxxCompiler: no compiler")

    with pytest.warns(UserWarning, match="no compiler.*goes on without it") as caught:
        assert not compile_backbone(backbone, trial)
    assert sum(warning.category is UserWarning for warning in caught) == 1
    assert backbone(torch.ones(1, 3)).shape == (1, 3)
    assert list(backbone.state_dict()) == ["weight", "bias"]


def test_a_compiled_backbone_keeps_its_names_and_its_results():
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 2))
    x = torch.randn(4, 3)
    expected = backbone(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        compiled = compile_backbone(backbone, lambda: backbone(x).sum().backward())
    assert compiled, "this machine has a compiler"
    torch.testing.assert_close(backbone(x), expected)
    assert list(backbone.state_dict())[0] == "0.weight"
