"""allfinite.nn.CrossEntropyLoss is a drop-in for torch.nn.CrossEntropyLoss."""

import copy
import inspect
import pickle
import warnings

import pytest
import torch

import allfinite
from support.bounds import assert_same_bits

WEIGHT = torch.tensor([0.5, 1.0, 2.0])
ARGUMENTS = [
    {},
    {"weight": WEIGHT},
    {"ignore_index": 1, "reduction": "sum"},
    {"weight": WEIGHT, "label_smoothing": 0.2, "reduction": "none"},
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_same_state_repr_and_values(arguments):
    """A checkpoint of torch's module loads, and the other way round; repr and loss differ in nothing."""
    ours, theirs = allfinite.nn.CrossEntropyLoss(**arguments), torch.nn.CrossEntropyLoss(**arguments)
    assert repr(ours) == repr(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    x, target = torch.randn(6, 3), torch.randint(0, 3, (6,))
    torch.testing.assert_close(ours(x, target), theirs(x, target))


def test_same_signature_and_z_loss():
    """Every argument of torch's constructor, by position too; z_loss by name."""
    ours, theirs = (list(inspect.signature(m.CrossEntropyLoss.__init__).parameters) for m in (allfinite.nn, torch.nn))
    assert ours == [*theirs, "z_loss"]


@pytest.mark.parametrize(("size_average", "reduce"), [(False, None), (True, True), (None, False)])
def test_old_arguments_mean_what_they_mean_in_torch(size_average, reduce):
    """size_average and reduce, deprecated, still choose the reduction, with torch's warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = allfinite.nn.CrossEntropyLoss(None, size_average, -100, reduce)
        theirs = torch.nn.CrossEntropyLoss(None, size_average, -100, reduce)
    assert ours.reduction == theirs.reduction


def test_forward_is_the_op():
    """The module passes every option on, and does not fall back to torch's: z_loss and an ignored NaN show it."""
    module = allfinite.nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1, z_loss=0.01)
    x, target = torch.randn(4, 3), torch.tensor([0, -100, 2, 1])
    x[1] = float("nan")
    leaf = x.requires_grad_()
    loss = module(leaf, target)
    assert_same_bits(loss, allfinite.cross_entropy(x, target, WEIGHT, label_smoothing=0.1, z_loss=0.01))
    loss.backward()
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()


def test_copy_and_pickle():
    """Criteria are copied and saved with the model."""
    module = allfinite.nn.CrossEntropyLoss(WEIGHT, z_loss=0.5)
    x, target = torch.randn(2, 3), torch.tensor([0, 1])
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(other) is allfinite.nn.CrossEntropyLoss
        assert_same_bits(other(x, target), module(x, target))


def test_torch_s_module_with_this_forward():
    """What convert() makes of torch's module, which has no z_loss."""
    theirs = torch.nn.CrossEntropyLoss()
    x, target = torch.randn(2, 3).half(), torch.tensor([0, 1])
    assert_same_bits(allfinite.nn.CrossEntropyLoss.forward(theirs, x, target), allfinite.cross_entropy(x, target))
