"""Bad input of cross_entropy."""

import torch

import allfinite
from bad_calls.case import Refusals, nested

X, T, P = torch.ones(2, 4), torch.tensor([0, 3]), torch.full((2, 4), 0.25)
NESTED = nested(X)
FLOATS = "float16, bfloat16, float32 or float64"
INDEX = "or ignore_index -100, but got"
DENSE = "to be a dense (strided) tensor, but got a nested one"
bad = Refusals("allfinite::cross_entropy", allfinite.cross_entropy)

CASES = [
    bad("no input", None, T).raises(TypeError, "expected input to be a tensor, but got none"),
    bad("no target", X, None).raises(TypeError, "expected target to be a tensor, but got none"),
    bad("integers", X.long(), T).raises(TypeError, f"expected input to be {FLOATS}, but got Long"),
    bad("complex", X.to(torch.complex64), T).raises(TypeError, f"expected input to be {FLOATS}, but got ComplexFloat"),
    bad("sparse", X.to_sparse(), T).raises(
        NotImplementedError, "expected input to be a dense (strided) tensor, but got layout Sparse"
    ),
    bad("sparse target", X, P.to_sparse()).raises(
        NotImplementedError, "expected target to be a dense (strided) tensor, but got layout Sparse"
    ),
    bad("scalar", torch.tensor(1.0), torch.tensor(0)).raises(
        ValueError, "expected input of shape (C), (N, C) or (N, C, d1, ...), but got []"
    ),
    bad("rows", X, torch.tensor([0, 1, 2])).raises(
        ValueError, "expected target of shape [2] (class indices) or [2, 4] (class probabilities), but got [3]"
    ),
    bad("one row for all", X, torch.tensor(0)).raises(
        ValueError, "expected target of shape [2] (class indices) or [2, 4] (class probabilities), but got []"
    ),
    bad("positions", torch.ones(2, 3, 5), torch.zeros(2, 4, dtype=torch.long)).raises(
        ValueError, "expected target of shape [2, 5] (class indices) or [2, 3, 5] (class probabilities), but got [2, 4]"
    ),
    bad("two targets of one row", X[0], torch.tensor([0, 1])).raises(
        ValueError, "expected target of shape [] (class indices) or [4] (class probabilities), but got [2]"
    ),
    bad("int32", X, T.int()).raises(TypeError, "expected class indices in int64 or uint8, but got Int"),
    bad("bool", X, T.bool()).raises(TypeError, "expected class indices in int64 or uint8, but got Bool"),
    bad("float indices", X, T.float()).raises(TypeError, "expected class indices in int64 or uint8, but got Float"),
    bad("integer probabilities", X, P.long()).raises(
        TypeError, "expected a target of input's shape to hold class probabilities in a floating dtype, but got Long"
    ),
    bad("ignore_index beside probabilities", X, P, ignore_index=1).raises(
        ValueError, "expected no ignore_index beside class probabilities, but got 1"
    ),
    bad("weight's shape", X, T, torch.ones(3)).raises(ValueError, "expected weight of shape [4], but got [3]"),
    bad("weight's dimensions", X, T, torch.ones(1, 4)).raises(
        ValueError, "expected weight of shape [4], but got [1, 4]"
    ),
    bad("weight's dtype", X, T, torch.ones(4).double()).raises(
        TypeError, "expected weight of input's dtype, Float, or float32 beside a 16-bit input, but got Double"
    ),
    bad("the other 16 bits", X.half(), T, torch.ones(4).bfloat16()).raises(
        TypeError, "expected weight of input's dtype, Half, or float32 beside a 16-bit input, but got BFloat16"
    ),
    bad("fp32 weight beside fp64", X.double(), T, torch.ones(4)).raises(
        TypeError, "expected weight of input's dtype, Double, or float32 beside a 16-bit input, but got Float"
    ),
    bad("sparse weight", X, T, torch.ones(4).to_sparse()).raises(
        NotImplementedError, "expected weight to be a dense (strided) tensor, but got layout Sparse"
    ),
    bad("weight with gradient", X, T, torch.ones(4, requires_grad=True)).raises(
        NotImplementedError, "expected a weight that requires no gradient, but got one that does"
    ),
    bad("target's device", X, T.to("meta")).raises(
        RuntimeError, "expected target on the device of input, cpu, but got meta"
    ),
    bad("weight's device", X, T, torch.ones(4, device="meta")).raises(
        RuntimeError, "expected weight on the device of input, cpu, but got meta"
    ),
    bad("reduction", X, T, reduction="batchmean").raises(
        ValueError, "expected reduction to be none, mean or sum, but got batchmean"
    ),
    bad("too smooth", X, T, label_smoothing=1.5).raises(ValueError, "expected label_smoothing in [0, 1], but got 1.5"),
    bad("negative smoothing", X, T, label_smoothing=-0.5).raises(
        ValueError, "expected label_smoothing in [0, 1], but got -0.5"
    ),
    bad("NaN smoothing", X, T, label_smoothing=float("nan")).raises(
        ValueError, "expected label_smoothing in [0, 1], but got nan"
    ),
    bad("negative z_loss", X, T, z_loss=-1.0).raises(ValueError, "expected z_loss >= 0 and finite, but got -1"),
    bad("infinite z_loss", X, T, z_loss=float("inf")).raises(
        ValueError, "expected z_loss >= 0 and finite, but got inf"
    ),
    bad("class too large", X, torch.tensor([0, 4])).raises(
        IndexError, f"expected classes in [0, 4) {INDEX} 4 at row 1"
    ),
    bad("negative class", X, torch.tensor([-1, 4])).raises(
        IndexError, f"expected classes in [0, 4) {INDEX} -1 at row 0"
    ),
    bad(
        "class at a position",
        torch.ones(2, 3, 5),
        torch.zeros(2, 5, dtype=torch.long).index_put_(tuple(T[:, None]), T[1]),
    ).raises(IndexError, f"expected classes in [0, 3) {INDEX} 3 at row 3"),
    bad("uint8 class", X, torch.tensor([0, 255], dtype=torch.uint8)).raises(
        IndexError, f"expected classes in [0, 4) {INDEX} 255 at row 1"
    ),
    bad("a class of none", torch.ones(1, 0), torch.tensor([0])).raises(
        IndexError, f"expected classes in [0, 0) {INDEX} 0 at row 0"
    ),
    bad("nested", NESTED, T).raises(NotImplementedError, f"expected input {DENSE}"),
    bad("nested target", X, NESTED).raises(NotImplementedError, f"expected target {DENSE}"),
    bad("nested weight", X, T, NESTED).raises(NotImplementedError, f"expected weight {DENSE}"),
]
