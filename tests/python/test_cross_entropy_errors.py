"""What tracing, forward mode and autograd refuse of cross_entropy; bad arguments: bad_calls/cross_entropy.py."""

import pytest
import torch

import allfinite

X, T, P = torch.ones(2, 4), torch.tensor([0, 3]), torch.full((2, 4), 0.25)
ce = allfinite.cross_entropy


def test_backward_checks_the_classes_too():
    """The inner op can be called by itself: a bad class must not become an address."""
    loss, stats, denominator = torch.ops.allfinite._cross_entropy_forward(X, T, None, -100, 1, 0.0, 0.0)
    with pytest.raises(IndexError, match="but got 7 at row 1"):
        torch.ops.allfinite._cross_entropy_backward(
            loss, X, torch.tensor([0, 7]), None, stats, denominator, -100, 1, 0.0, 0.0, [True, False]
        )


@pytest.mark.parametrize("mode", ["meta", "compile"])
def test_meta_and_compiled_calls_refuse_the_same(mode):
    """The checks run before dispatch, so tracing cannot slip past them."""
    if mode == "meta":
        with pytest.raises(ValueError, match=r"allfinite::cross_entropy: expected target of shape \[2\]"):
            ce(X.to("meta"), T[:1].to("meta"))
    else:
        function = torch.compile(lambda x: ce(x, T, reduction="x"), backend="eager", fullgraph=True)
        with pytest.raises(Exception, match="expected reduction to be none, mean or sum"):
            function(X)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, on first use of forward mode
def test_forward_mode_is_refused_by_name():
    """A tangent would otherwise become zero in silence; also that of a weight, and of probabilities."""
    with torch.autograd.forward_ad.dual_level():
        for arguments in ((X, T, None), (X, P, None), (X, T, torch.ones(4))):
            for i, given in enumerate(arguments):
                if given is None or not given.is_floating_point():
                    continue
                duals = list(arguments)
                duals[i] = torch.autograd.forward_ad.make_dual(given, torch.ones_like(given))
                with pytest.raises(NotImplementedError, match="allfinite::cross_entropy: expected reverse-mode"):
                    ce(*duals)


def test_backward_twice_names_the_cause():
    """torch's own message for a freed graph, not a crash on released tensors."""
    loss = ce(X.clone().requires_grad_(), T)
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.parametrize("changed", ["input", "target"])
def test_changed_tensors_are_noticed(changed):
    """Saved tensors carry their version: an in-place change before backward is an error, not a wrong gradient."""
    hidden, target = torch.randn(2, 4, requires_grad=True) * 1, T.clone()
    loss = ce(hidden, target)
    (hidden if changed == "input" else target).add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
