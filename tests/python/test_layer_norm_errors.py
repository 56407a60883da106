"""Bad input of layer_norm: the type and text of each error (test_layer_norm.cpp has the same texts for C++)."""

import pytest
import torch

import allfinite
from support.norm_errors import W, X, common_cases

CASES = {
    **common_cases(allfinite.layer_norm),
    "weight's shape": (
        lambda: allfinite.layer_norm(X, (4,), torch.ones(3)),
        ValueError,
        "expected weight of shape [4], but got [3]",
    ),
    "bias's shape": (
        lambda: allfinite.layer_norm(X, (4,), W, torch.ones(1, 4)),
        ValueError,
        "expected bias of shape [4], but got [1, 4]",
    ),
    "bias's dtype": (
        lambda: allfinite.layer_norm(X.half(), (4,), W.half(), W.double()),
        TypeError,
        "expected bias of input's dtype, Half, or float32 beside a 16-bit input, but got Double",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused(case):
    """Op, argument, what was expected and what came; the type as torch would choose."""
    call, kind, message = CASES[case]
    with pytest.raises(kind) as raised:
        call()
    assert type(raised.value) is kind
    assert str(raised.value).splitlines()[0] == f"allfinite::layer_norm: {message}"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused():
    """A nested tensor, whose sizes cannot be asked for: refused by name, not by an internal error of torch."""
    nested = torch.nested.nested_tensor([X])
    for name, arguments in (("input", (nested, (4,))), ("weight", (X, (4,), nested))):
        with pytest.raises(NotImplementedError) as raised:
            allfinite.layer_norm(*arguments)
        message = f"allfinite::layer_norm: expected {name} to be a dense (strided) tensor, but got a nested one"
        assert str(raised.value).splitlines()[0] == message


@pytest.mark.parametrize("mode", ["meta", "compile"])
def test_meta_and_compiled_calls_refuse_the_same(mode):
    """The checks run before dispatch, so tracing cannot slip past them."""
    if mode == "meta":
        with pytest.raises(ValueError, match="allfinite::layer_norm: expected input to end in normalized_shape"):
            allfinite.layer_norm(X.to("meta"), (5,))
    else:
        function = torch.compile(lambda x: allfinite.layer_norm(x, (5,)), backend="eager", fullgraph=True)
        with pytest.raises(Exception, match="expected input to end in normalized_shape"):
            function(X)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, on first use of forward mode
def test_forward_mode_is_refused_by_name():
    """A tangent would otherwise become zero in silence."""
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(X, X)
        with pytest.raises(NotImplementedError, match="allfinite::layer_norm: expected reverse-mode differentiation"):
            allfinite.layer_norm(dual, (4,))


def test_backward_twice_names_the_cause():
    """torch's own message for a freed graph, not a crash on released tensors."""
    x = X.clone().requires_grad_()
    loss = allfinite.layer_norm(x, (4,)).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_changed_input_is_noticed():
    """Saved tensors carry their version: an in-place change before backward is an error, not a wrong gradient."""
    x = torch.randn(2, 4, requires_grad=True)
    hidden = x * 1
    y = allfinite.layer_norm(hidden, (4,))
    hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
