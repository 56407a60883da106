"""Bad input of add_layer_norm and add_rms_norm: type and text (test_add_norm.cpp has the same texts for C++)."""

import pytest
import torch

import allfinite
from support.add_norm import NAMES

X, W = torch.ones(2, 4), torch.ones(4)
# (arguments, keywords), type, message; of both ops
CASES = {
    "input none": (
        ((None, X, (4,)), {}),
        TypeError,
        "expected input to be a tensor, but got none",
    ),
    "integers": (
        ((X.long(), X, (4,)), {}),
        TypeError,
        "expected input to be float16, bfloat16, float32 or float64, but got Long",
    ),
    "sparse": (
        ((X.to_sparse(), X, (4,)), {}),
        NotImplementedError,
        "expected input to be a dense (strided) tensor, but got layout Sparse",
    ),
    "no shape": (
        ((X, X, ()), {}),
        ValueError,
        "expected normalized_shape of at least one dimension, but got []",
    ),
    "wrong shape": (
        ((X, X, (5,)), {}),
        ValueError,
        "expected input to end in normalized_shape [5], but got input of shape [2, 4]",
    ),
    "residual none": (
        ((X, None, (4,)), {}),
        TypeError,
        "expected residual to be a tensor, but got none",
    ),
    "residual's shape": (
        ((X, torch.ones(4), (4,)), {}),
        ValueError,
        "expected residual of input's shape, [2, 4], but got [4]",
    ),
    "residual to broadcast": (
        ((X, torch.ones(1, 4), (4,)), {}),
        ValueError,
        "expected residual of input's shape, [2, 4], but got [1, 4]",
    ),
    "narrow residual": (
        ((X, X.half(), (4,)), {}),
        TypeError,
        "expected residual of input's dtype, Float, or float32 beside a 16-bit input, but got Half",
    ),
    "wide residual": (
        ((X.half(), X.double(), (4,)), {}),
        TypeError,
        "expected residual of input's dtype, Half, or float32 beside a 16-bit input, but got Double",
    ),
    "the other 16 bits": (
        ((X.half(), X.bfloat16(), (4,)), {}),
        TypeError,
        "expected residual of input's dtype, Half, or float32 beside a 16-bit input, but got BFloat16",
    ),
    "integer residual": (
        ((X, X.long(), (4,)), {}),
        TypeError,
        "expected residual of input's dtype, Float, or float32 beside a 16-bit input, but got Long",
    ),
    "residual's device": (
        ((X, X.to("meta"), (4,)), {}),
        RuntimeError,
        "expected residual on the device of input, cpu, but got meta",
    ),
    "sparse residual": (
        ((X, X.to_sparse(), (4,)), {}),
        NotImplementedError,
        "expected residual to be a dense (strided) tensor, but got layout Sparse",
    ),
    "weight's shape": (
        ((X, X, (4,), torch.ones(3)), {}),
        ValueError,
        "expected weight of shape [4], but got [3]",
    ),
    "weight's dtype": (
        ((X, X, (4,), W.half()), {}),
        TypeError,
        "expected weight of input's dtype, Float, or float32 beside a 16-bit input, but got Half",
    ),
    "weight's device": (
        ((X, X, (4,), W.to("meta")), {}),
        RuntimeError,
        "expected weight on the device of input, cpu, but got meta",
    ),
    "negative eps": (
        ((X, X, (4,)), {"eps": -1.0}),
        ValueError,
        "expected eps >= 0 and finite, but got -1",
    ),
    "NaN eps": (
        ((X, X, (4,)), {"eps": float("nan")}),
        ValueError,
        "expected eps >= 0 and finite, but got nan",
    ),
}


def assert_refused(name, arguments, keywords, kind, message):
    with pytest.raises(kind) as raised:
        getattr(allfinite, name)(*arguments, **keywords)
    assert type(raised.value) is kind
    assert str(raised.value).splitlines()[0] == f"allfinite::{name}: {message}"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused(name, case):
    """Op, argument, what was expected and what came; the type as torch would choose."""
    (arguments, keywords), kind, message = CASES[case]
    assert_refused(name, arguments, keywords, kind, message)


def test_bad_bias_is_refused():
    """add_layer_norm's bias, by the rules of its weight."""
    name, beside = "add_layer_norm", "expected bias of input's dtype, Half, or float32 beside a 16-bit input, but got"
    assert_refused(
        name, (X, X, (4,), W, torch.ones(1, 4)), {}, ValueError, "expected bias of shape [4], but got [1, 4]"
    )
    half = X.half()
    assert_refused(name, (half, half, (4,), None, W.double()), {}, TypeError, f"{beside} Double")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused(name):
    """A nested tensor, whose sizes cannot be asked for: refused by name, not by an internal error of torch."""
    nested = torch.nested.nested_tensor([X])
    message = "expected residual to be a dense (strided) tensor, but got a nested one"
    assert_refused(name, (X, nested, (4,)), {}, NotImplementedError, message)


@pytest.mark.parametrize("name", NAMES)
def test_meta_and_compiled_calls_refuse_the_same(name):
    """The checks run before dispatch, so tracing cannot slip past them."""
    op = getattr(allfinite, name)
    with pytest.raises(ValueError, match=f"allfinite::{name}: expected residual of input's shape"):
        op(X.to("meta"), W.to("meta"), (4,))
    function = torch.compile(lambda x, r: op(x, r, (4,)), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="expected residual of input's shape"):
        function(X, W)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, on first use of forward mode
def test_forward_mode_is_refused_by_name(name, position):
    """A tangent of input or residual would otherwise become zero in silence."""
    with torch.autograd.forward_ad.dual_level():
        arguments = [X, X]
        arguments[position] = torch.autograd.forward_ad.make_dual(X, X)
        with pytest.raises(NotImplementedError, match=f"allfinite::{name}: expected reverse-mode differentiation"):
            getattr(allfinite, name)(*arguments, (4,))


@pytest.mark.parametrize("name", NAMES)
def test_backward_twice_names_the_cause(name):
    """torch's own message for a freed graph, not a crash on released tensors."""
    x = X.clone().requires_grad_()
    loss = getattr(allfinite, name)(x, X, (4,))[0].sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.parametrize("name", NAMES)
def test_changed_sum_is_noticed(name):
    """The stored sum is what backward reads: changing it in place before backward is an error, not a wrong gradient."""
    x = torch.randn(2, 4, requires_grad=True)
    y, total = getattr(allfinite, name)(x, X, (4,))
    with torch.no_grad():
        total.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
