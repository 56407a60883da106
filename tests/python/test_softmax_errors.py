"""Bad input of softmax: the type and text of each error (test_softmax.cpp has the same texts for C++)."""

import pytest
import torch

import allfinite

X = torch.ones(2, 3, 4)
CASES = {
    "none": (lambda: allfinite.softmax(None, 1), TypeError, "expected input to be a tensor, but got none"),
    "integers": (
        lambda: allfinite.softmax(X.long(), 1),
        TypeError,
        "expected input to be float16, bfloat16, float32 or float64, but got Long",
    ),
    "complex": (
        lambda: allfinite.softmax(X.to(torch.complex64), 1),
        TypeError,
        "expected input to be float16, bfloat16, float32 or float64, but got ComplexFloat",
    ),
    "sparse": (
        lambda: allfinite.softmax(X.to_sparse(), 1),
        NotImplementedError,
        "expected input to be a dense (strided) tensor, but got layout Sparse",
    ),
    "dim too large": (lambda: allfinite.softmax(X, 3), IndexError, "expected dim in [-3, 2], but got 3"),
    "dim too small": (lambda: allfinite.softmax(X, -4), IndexError, "expected dim in [-3, 2], but got -4"),
    "dim of a scalar": (
        lambda: allfinite.softmax(torch.ones(()), 1),
        IndexError,
        "expected dim in [-1, 0], but got 1",
    ),
    "integer mask": (
        lambda: allfinite.softmax(X, 1, mask=torch.ones(4, dtype=torch.int64)),
        TypeError,
        "expected mask to be bool (True: takes part) or floating (added), but got Long",
    ),
    "float8 mask": (
        lambda: allfinite.softmax(X, 1, mask=torch.ones(4).to(torch.float8_e5m2)),
        TypeError,
        "expected mask to be float16, bfloat16, float32 or float64, but got Float8_e5m2",
    ),
    "mask's shape": (
        lambda: allfinite.softmax(X, 1, mask=torch.ones(3)),
        ValueError,
        "expected mask to broadcast to input's shape, [2, 3, 4], but got [3]",
    ),
    "mask that enlarges": (
        lambda: allfinite.softmax(X[:1], 1, mask=torch.ones(2, 3, 4)),
        ValueError,
        "expected mask to broadcast to input's shape, [1, 3, 4], but got [2, 3, 4]",
    ),
    "mask of more dimensions": (
        lambda: allfinite.softmax(X, 1, mask=torch.ones(1, 2, 3, 4)),
        ValueError,
        "expected mask to broadcast to input's shape, [2, 3, 4], but got [1, 2, 3, 4]",
    ),
    "mask of a scalar": (
        lambda: allfinite.softmax(torch.ones(()), 0, mask=torch.ones(1)),
        ValueError,
        "expected mask to broadcast to input's shape, [], but got [1]",
    ),
    "mask's device": (
        lambda: allfinite.softmax(X, 1, mask=torch.ones(4, device="meta")),
        RuntimeError,
        "expected mask on the device of input, cpu, but got meta",
    ),
    "sparse mask": (
        lambda: allfinite.softmax(X, 1, mask=X.to_sparse()),
        NotImplementedError,
        "expected mask to be a dense (strided) tensor, but got layout Sparse",
    ),
    "NaN scale": (
        lambda: allfinite.softmax(X, 1, scale=float("nan")),
        ValueError,
        "expected a finite scale, but got nan",
    ),
    "infinite scale": (
        lambda: allfinite.softmax(X, 1, scale=float("-inf")),
        ValueError,
        "expected a finite scale, but got -inf",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused(case):
    """Op, argument, what was expected and what came; the type as torch would choose."""
    call, kind, message = CASES[case]
    with pytest.raises(kind) as raised:
        call()
    assert type(raised.value) is kind
    assert str(raised.value).splitlines()[0] == f"allfinite::softmax: {message}"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused():
    """A nested tensor, whose sizes cannot be asked for: refused by name, not by an internal error of torch."""
    nested = torch.nested.nested_tensor([X])
    for name, arguments in (("input", {"input": nested}), ("mask", {"input": X, "mask": nested})):
        with pytest.raises(NotImplementedError) as raised:
            allfinite.softmax(dim=1, **arguments)
        message = f"allfinite::softmax: expected {name} to be a dense (strided) tensor, but got a nested one"
        assert str(raised.value).splitlines()[0] == message


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
