"""Bad input of softmax."""

import torch

import allfinite
from bad_calls.case import Refusals, nested

X = torch.ones(2, 3, 4)
NESTED = nested(torch.ones(3, 4))
bad = Refusals("allfinite::softmax", allfinite.softmax)

CASES = [
    bad("none", None, 1).raises(TypeError, "expected input to be a tensor, but got none"),
    bad("integers", X.long(), 1).raises(
        TypeError, "expected input to be float16, bfloat16, float32 or float64, but got Long"
    ),
    bad("complex", X.to(torch.complex64), 1).raises(
        TypeError, "expected input to be float16, bfloat16, float32 or float64, but got ComplexFloat"
    ),
    bad("sparse", X.to_sparse(), 1).raises(
        NotImplementedError, "expected input to be a dense (strided) tensor, but got layout Sparse"
    ),
    bad("dim too large", X, 3).raises(IndexError, "expected dim in [-3, 2], but got 3"),
    bad("dim too small", X, -4).raises(IndexError, "expected dim in [-3, 2], but got -4"),
    bad("dim of a scalar", torch.ones(()), 1).raises(IndexError, "expected dim in [-1, 0], but got 1"),
    bad("integer mask", X, 1, mask=torch.ones(4, dtype=torch.int64)).raises(
        TypeError, "expected mask to be bool (True: takes part) or floating (added), but got Long"
    ),
    bad("float8 mask", X, 1, mask=torch.ones(4).to(torch.float8_e5m2)).raises(
        TypeError, "expected mask to be float16, bfloat16, float32 or float64, but got Float8_e5m2"
    ),
    bad("mask's shape", X, 1, mask=torch.ones(3)).raises(
        ValueError, "expected mask to broadcast to input's shape, [2, 3, 4], but got [3]"
    ),
    bad("mask that enlarges", X[:1], 1, mask=torch.ones(2, 3, 4)).raises(
        ValueError, "expected mask to broadcast to input's shape, [1, 3, 4], but got [2, 3, 4]"
    ),
    bad("mask of more dimensions", X, 1, mask=torch.ones(1, 2, 3, 4)).raises(
        ValueError, "expected mask to broadcast to input's shape, [2, 3, 4], but got [1, 2, 3, 4]"
    ),
    bad("mask of a scalar", torch.ones(()), 0, mask=torch.ones(1)).raises(
        ValueError, "expected mask to broadcast to input's shape, [], but got [1]"
    ),
    bad("mask's device", X, 1, mask=torch.ones(4, device="meta")).raises(
        RuntimeError, "expected mask on the device of input, cpu, but got meta"
    ),
    bad("sparse mask", X, 1, mask=X.to_sparse()).raises(
        NotImplementedError, "expected mask to be a dense (strided) tensor, but got layout Sparse"
    ),
    bad("NaN scale", X, 1, scale=float("nan")).raises(ValueError, "expected a finite scale, but got nan"),
    bad("infinite scale", X, 1, scale=float("-inf")).raises(ValueError, "expected a finite scale, but got -inf"),
    bad("nested", NESTED, 1).raises(
        NotImplementedError, "expected input to be a dense (strided) tensor, but got a nested one"
    ),
    bad("nested mask", X, 1, mask=NESTED).raises(
        NotImplementedError, "expected mask to be a dense (strided) tensor, but got a nested one"
    ),
    bad("NaN mask's device and scale", X, 1, mask=X.to("meta"), scale=float("nan")).raises(
        RuntimeError, "expected mask on the device of input, cpu, but got meta"
    ),
]
