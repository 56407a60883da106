"""Bad input of rms_norm: the type and text of each error (test_rms_norm.cpp has the same texts for C++)."""

import pytest
import torch

import allfinite
from support.norm_errors import X, common_cases

CASES = {
    **common_cases(allfinite.rms_norm),
    "weight's shape": (
        lambda: allfinite.rms_norm(X, (4,), torch.ones(1, 4)),
        ValueError,
        "expected weight of shape [4], but got [1, 4]",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused(case):
    """Op, argument, what was expected and what came; the type as torch would choose."""
    call, kind, message = CASES[case]
    with pytest.raises(kind) as raised:
        call()
    assert type(raised.value) is kind
    assert str(raised.value).splitlines()[0] == f"allfinite::rms_norm: {message}"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused():
    """A nested tensor, whose sizes cannot be asked for: refused by name, not by an internal error of torch."""
    nested = torch.nested.nested_tensor([X])
    for name, arguments in (("input", (nested, (4,))), ("weight", (X, (4,), nested))):
        with pytest.raises(NotImplementedError) as raised:
            allfinite.rms_norm(*arguments)
        message = f"allfinite::rms_norm: expected {name} to be a dense (strided) tensor, but got a nested one"
        assert str(raised.value).splitlines()[0] == message


def test_meta_and_compiled_calls_refuse_the_same():
    """The checks run before dispatch, so tracing cannot slip past them."""
    with pytest.raises(ValueError, match="allfinite::rms_norm: expected input to end in normalized_shape"):
        allfinite.rms_norm(X.to("meta"), (5,))
    function = torch.compile(lambda x: allfinite.rms_norm(x, (5,)), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="expected input to end in normalized_shape"):
        function(X)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, on first use of forward mode
def test_forward_mode_is_refused_by_name():
    """A tangent would otherwise become zero in silence."""
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(X, X)
        with pytest.raises(NotImplementedError, match="allfinite::rms_norm: expected reverse-mode differentiation"):
            allfinite.rms_norm(dual, (4,))
    with pytest.raises(NotImplementedError, match="allfinite::rms_norm"):
        torch.func.jvp(lambda t: allfinite.rms_norm(t, (4,)), (X,), (X,))


def test_backward_twice_names_the_cause():
    """torch's own message for a freed graph, not a crash on released tensors."""
    x = X.clone().requires_grad_()
    loss = allfinite.rms_norm(x, (4,)).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_changed_input_is_noticed():
    """Saved tensors carry their version: an in-place change before backward is an error, not a wrong gradient."""
    x = torch.randn(2, 4, requires_grad=True)
    hidden = x * 1
    y = allfinite.rms_norm(hidden, (4,))
    hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
