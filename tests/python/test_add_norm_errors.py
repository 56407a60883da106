"""What tracing, forward mode and autograd refuse of add_layer_norm and add_rms_norm; arguments: bad_calls/norms.py."""

import pytest
import torch

import allfinite
from support.add_norm import NAMES

X, W = torch.ones(2, 4), torch.ones(4)


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
