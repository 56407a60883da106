"""What tracing, forward mode and autograd refuse of softmax; bad arguments: bad_calls/softmax.py."""

import pytest
import torch

import allfinite

X = torch.ones(2, 3, 4)


def test_meta_and_compiled_calls_refuse_the_same():
    """The checks run before dispatch, so tracing cannot slip past them."""
    with pytest.raises(IndexError, match="allfinite::softmax: expected dim in"):
        allfinite.softmax(X.to("meta"), 5)
    function = torch.compile(lambda x: allfinite.softmax(x, 5), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="expected dim in"):
        function(X)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, on first use of forward mode
@pytest.mark.parametrize("argument", ["input", "mask"])
def test_forward_mode_is_refused_by_name(argument):
    """A tangent would otherwise become zero in silence."""
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(X, X)
        arguments = {"input": X, "mask": X, argument: dual}
        with pytest.raises(NotImplementedError, match="allfinite::softmax: expected reverse-mode differentiation"):
            allfinite.softmax(dim=1, **arguments)


def test_backward_twice_names_the_cause():
    """torch's own message for a freed graph, not a crash on released tensors."""
    loss = allfinite.softmax(X.clone().requires_grad_(), 1).square().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.parametrize("changed", ["input", "output", "mask"])
def test_changed_tensors_are_noticed(changed):
    """Saved tensors carry their version: an in-place change before backward is an error, not a wrong gradient."""
    hidden = torch.randn(2, 4, requires_grad=True) * 1
    mask = torch.zeros(4)
    y = allfinite.softmax(hidden, 1, mask=mask)
    tensors = {"input": hidden, "output": y, "mask": mask}
    loss = y.sum()
    tensors[changed].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
