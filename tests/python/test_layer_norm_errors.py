"""What tracing, forward mode and autograd refuse of layer_norm; bad arguments: bad_calls/norms.py."""

import pytest
import torch

import allfinite

X = torch.ones(2, 4)


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
