"""Bad input of cross_entropy: the type and text of each error (test_cross_entropy.cpp has the same texts for C++)."""

import pytest
import torch

import allfinite

X, T, P = torch.ones(2, 4), torch.tensor([0, 3]), torch.full((2, 4), 0.25)
ce = allfinite.cross_entropy
FLOATS = "float16, bfloat16, float32 or float64"
INDEX = "or ignore_index -100, but got"
CASES = {
    "no input": (lambda: ce(None, T), TypeError, "expected input to be a tensor, but got none"),
    "no target": (lambda: ce(X, None), TypeError, "expected target to be a tensor, but got none"),
    "integers": (lambda: ce(X.long(), T), TypeError, f"expected input to be {FLOATS}, but got Long"),
    "complex": (
        lambda: ce(X.to(torch.complex64), T),
        TypeError,
        f"expected input to be {FLOATS}, but got ComplexFloat",
    ),
    "sparse": (
        lambda: ce(X.to_sparse(), T),
        NotImplementedError,
        "expected input to be a dense (strided) tensor, but got layout Sparse",
    ),
    "sparse target": (
        lambda: ce(X, P.to_sparse()),
        NotImplementedError,
        "expected target to be a dense (strided) tensor, but got layout Sparse",
    ),
    "scalar": (
        lambda: ce(torch.tensor(1.0), torch.tensor(0)),
        ValueError,
        "expected input of shape (C), (N, C) or (N, C, d1, ...), but got []",
    ),
    "rows": (
        lambda: ce(X, torch.tensor([0, 1, 2])),
        ValueError,
        "expected target of shape [2] (class indices) or [2, 4] (class probabilities), but got [3]",
    ),
    "one row for all": (
        lambda: ce(X, torch.tensor(0)),
        ValueError,
        "expected target of shape [2] (class indices) or [2, 4] (class probabilities), but got []",
    ),
    "positions": (
        lambda: ce(torch.ones(2, 3, 5), torch.zeros(2, 4, dtype=torch.long)),
        ValueError,
        "expected target of shape [2, 5] (class indices) or [2, 3, 5] (class probabilities), but got [2, 4]",
    ),
    "two targets of one row": (
        lambda: ce(X[0], torch.tensor([0, 1])),
        ValueError,
        "expected target of shape [] (class indices) or [4] (class probabilities), but got [2]",
    ),
    "int32": (lambda: ce(X, T.int()), TypeError, "expected class indices in int64 or uint8, but got Int"),
    "bool": (lambda: ce(X, T.bool()), TypeError, "expected class indices in int64 or uint8, but got Bool"),
    "float indices": (lambda: ce(X, T.float()), TypeError, "expected class indices in int64 or uint8, but got Float"),
    "integer probabilities": (
        lambda: ce(X, P.long()),
        TypeError,
        "expected a target of input's shape to hold class probabilities in a floating dtype, but got Long",
    ),
    "ignore_index beside probabilities": (
        lambda: ce(X, P, ignore_index=1),
        ValueError,
        "expected no ignore_index beside class probabilities, but got 1",
    ),
    "weight's shape": (lambda: ce(X, T, torch.ones(3)), ValueError, "expected weight of shape [4], but got [3]"),
    "weight's dimensions": (
        lambda: ce(X, T, torch.ones(1, 4)),
        ValueError,
        "expected weight of shape [4], but got [1, 4]",
    ),
    "weight's dtype": (
        lambda: ce(X, T, torch.ones(4).double()),
        TypeError,
        "expected weight of input's dtype, Float, or float32 beside a 16-bit input, but got Double",
    ),
    "the other 16 bits": (
        lambda: ce(X.half(), T, torch.ones(4).bfloat16()),
        TypeError,
        "expected weight of input's dtype, Half, or float32 beside a 16-bit input, but got BFloat16",
    ),
    "fp32 weight beside fp64": (
        lambda: ce(X.double(), T, torch.ones(4)),
        TypeError,
        "expected weight of input's dtype, Double, or float32 beside a 16-bit input, but got Float",
    ),
    "sparse weight": (
        lambda: ce(X, T, torch.ones(4).to_sparse()),
        NotImplementedError,
        "expected weight to be a dense (strided) tensor, but got layout Sparse",
    ),
    "weight with gradient": (
        lambda: ce(X, T, torch.ones(4, requires_grad=True)),
        NotImplementedError,
        "expected a weight that requires no gradient, but got one that does",
    ),
    "target's device": (
        lambda: ce(X, T.to("meta")),
        RuntimeError,
        "expected target on the device of input, cpu, but got meta",
    ),
    "weight's device": (
        lambda: ce(X, T, torch.ones(4, device="meta")),
        RuntimeError,
        "expected weight on the device of input, cpu, but got meta",
    ),
    "reduction": (
        lambda: ce(X, T, reduction="batchmean"),
        ValueError,
        "expected reduction to be none, mean or sum, but got batchmean",
    ),
    "too smooth": (
        lambda: ce(X, T, label_smoothing=1.5),
        ValueError,
        "expected label_smoothing in [0, 1], but got 1.5",
    ),
    "negative smoothing": (
        lambda: ce(X, T, label_smoothing=-0.5),
        ValueError,
        "expected label_smoothing in [0, 1], but got -0.5",
    ),
    "NaN smoothing": (
        lambda: ce(X, T, label_smoothing=float("nan")),
        ValueError,
        "expected label_smoothing in [0, 1], but got nan",
    ),
    "negative z_loss": (lambda: ce(X, T, z_loss=-1.0), ValueError, "expected z_loss >= 0 and finite, but got -1"),
    "infinite z_loss": (
        lambda: ce(X, T, z_loss=float("inf")),
        ValueError,
        "expected z_loss >= 0 and finite, but got inf",
    ),
    "class too large": (
        lambda: ce(X, torch.tensor([0, 4])),
        IndexError,
        f"expected classes in [0, 4) {INDEX} 4 at row 1",
    ),
    "negative class": (
        lambda: ce(X, torch.tensor([-1, 4])),
        IndexError,
        f"expected classes in [0, 4) {INDEX} -1 at row 0",
    ),
    "class at a position": (
        lambda: ce(torch.ones(2, 3, 5), torch.zeros(2, 5, dtype=torch.long).index_put_(tuple(T[:, None]), T[1])),
        IndexError,
        f"expected classes in [0, 3) {INDEX} 3 at row 3",
    ),
    "uint8 class": (
        lambda: ce(X, torch.tensor([0, 255], dtype=torch.uint8)),
        IndexError,
        f"expected classes in [0, 4) {INDEX} 255 at row 1",
    ),
    "a class of none": (
        lambda: ce(torch.ones(1, 0), torch.tensor([0])),
        IndexError,
        f"expected classes in [0, 0) {INDEX} 0 at row 0",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused(case):
    """Op, argument, what was expected and what came; the type as torch would choose."""
    call, kind, message = CASES[case]
    with pytest.raises(kind) as raised:
        call()
    assert type(raised.value) is kind
    assert str(raised.value).splitlines()[0] == f"allfinite::cross_entropy: {message}"


def test_backward_checks_the_classes_too():
    """The inner op can be called by itself: a bad class must not become an address."""
    loss, stats, denominator = torch.ops.allfinite._cross_entropy_forward(X, T, None, -100, 1, 0.0, 0.0)
    with pytest.raises(IndexError, match="but got 7 at row 1"):
        torch.ops.allfinite._cross_entropy_backward(
            loss, X, torch.tensor([0, 7]), None, stats, denominator, -100, 1, 0.0, 0.0, [True, False]
        )


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused():
    """Refused by name, not by an internal error of torch."""
    nested = torch.nested.nested_tensor([X])
    for name, arguments in (("input", (nested, T)), ("target", (X, nested)), ("weight", (X, T, nested))):
        with pytest.raises(NotImplementedError) as raised:
            ce(*arguments)
        message = f"allfinite::cross_entropy: expected {name} to be a dense (strided) tensor, but got a nested one"
        assert str(raised.value).splitlines()[0] == message


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
