"""allfinite.nn.Softmax: a drop-in for torch.nn.Softmax."""

import copy
import pickle

import pytest
import torch
from torch import nn

import allfinite
from support.bounds import assert_same_bits


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_as_torch(dim):
    """Same argument, repr, and result over any dimension."""
    ours, theirs, x = allfinite.nn.Softmax(dim), nn.Softmax(dim), torch.randn(3, 4, 5)
    assert repr(ours) == repr(theirs)
    torch.testing.assert_close(ours(x), theirs(x))
    assert not ours.state_dict()


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
@pytest.mark.parametrize("dims", [1, 2, 3, 4])
def test_no_dim_is_torch_s_choice(dims):
    """dim=None means 0 or 1, depending on the dimensions, and warns, as torch."""
    x = torch.randn((3, 4, 5, 2)[:dims])
    with pytest.warns(UserWarning, match="dim=None is deprecated"):
        got = allfinite.nn.Softmax()(x)
    torch.testing.assert_close(got, nn.Softmax()(x))


def test_f7_a_row_of_minus_infinity():
    """F7: 0, and gradient 0, where torch gives NaN."""
    x = torch.tensor([[-torch.inf, -torch.inf], [0.0, 0.0]], requires_grad=True)
    assert nn.Softmax(1)(x)[0].isnan().all()
    out = allfinite.nn.Softmax(1)(x)
    assert out.tolist() == [[0.0, 0.0], [0.5, 0.5]]
    out[:, 0].sum().backward()
    assert x.grad[0].tolist() == [0.0, 0.0]


def test_converted_copied_and_back():
    """convert swaps it, also in subclasses that keep forward; copies and pickles stay swapped; undo."""

    class Named(nn.Softmax):
        pass

    model, x = nn.Sequential(nn.Softmax(-1), Named(-1)), torch.randn(2, 5)
    want = model(x)
    report = allfinite.convert(model)
    assert [s.now for s in report.swapped] == ["allfinite.nn.Softmax"] * 2
    torch.testing.assert_close(model(x), want)
    assert_same_bits(copy.deepcopy(model)(x), model(x))
    assert_same_bits(pickle.loads(pickle.dumps(model[0]))(x), model[0](x))
    report.undo()
    assert [type(m) for m in model] == [nn.Softmax, Named]
