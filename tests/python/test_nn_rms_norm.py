"""allfinite.nn.RMSNorm is a drop-in for torch.nn.RMSNorm."""

import copy
import inspect
import pickle

import pytest
import torch

import allfinite
from support.bounds import assert_same_bits


@pytest.mark.parametrize(
    "arguments",
    [{}, {"eps": 1e-3}, {"elementwise_affine": False}, {"dtype": torch.float64}, {"device": "meta"}],
    ids=str,
)
def test_same_constructor_state_and_repr(arguments):
    """A checkpoint of torch's module loads, and the other way round; repr differs in nothing."""
    ours, theirs = allfinite.nn.RMSNorm((3, 5), **arguments), torch.nn.RMSNorm((3, 5), **arguments)
    assert repr(ours) == repr(theirs)
    state, expected = ours.state_dict(), theirs.state_dict()
    assert [(k, v.shape, v.dtype, v.device) for k, v in state.items()] == [
        (k, v.shape, v.dtype, v.device) for k, v in expected.items()
    ]
    if arguments.get("device") != "meta":
        ours.load_state_dict(expected)
        theirs.load_state_dict(state)


def test_same_signature():
    """Every argument of torch's constructor and forward, by position and by name too."""
    for method in ("__init__", "forward"):
        ours, theirs = (inspect.signature(getattr(m.RMSNorm, method)) for m in (allfinite.nn, torch.nn))
        assert list(ours.parameters) == list(theirs.parameters)


@pytest.mark.parametrize("shape", [5, (5,), [3, 5], torch.Size([3, 5])], ids=str)
def test_forward_and_backward_as_torch(shape):
    """Same values for all forms of normalized_shape."""
    ours, theirs = allfinite.nn.RMSNorm(shape), torch.nn.RMSNorm(shape)
    with torch.no_grad():
        ours.weight.uniform_()
        theirs.weight.copy_(ours.weight)
    x = torch.randn(2, 3, 5)
    for module in (ours, theirs):
        module(x).square().sum().backward()
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)


def test_forward_is_the_op():
    """The module must not fall back to torch's rms_norm: rows of 1e30 show the difference."""
    x = torch.randn(4, 64) * 1e30
    module = allfinite.nn.RMSNorm(64)
    assert_same_bits(module(x).detach(), allfinite.rms_norm(x, (64,), module.weight.detach()))
    assert module(x).abs().max() > 1


def test_sixteen_bit_input_with_fp32_weights_under_autocast():
    """The native autocast form: 16-bit in and out, fp32 parameters with fp32 gradients."""
    module = allfinite.nn.RMSNorm(8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(torch.randn(3, 8).bfloat16())
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad.dtype == torch.float32


def test_copy_and_pickle():
    """Models are copied and saved whole."""
    module = allfinite.nn.RMSNorm(4)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(other) is allfinite.nn.RMSNorm
        assert other.weight is not module.weight
        assert_same_bits(other(torch.ones(2, 4)), module(torch.ones(2, 4)))


def test_bad_input_has_the_op_s_message():
    """Errors name what came, as the op's."""
    with pytest.raises(ValueError, match=r"allfinite::rms_norm: expected input to end in normalized_shape \[4\]"):
        allfinite.nn.RMSNorm(4)(torch.ones(2, 5))
