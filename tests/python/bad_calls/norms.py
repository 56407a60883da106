"""Bad input of the norms: what all refuse alike, then each one's own."""

import torch

import allfinite
from bad_calls.case import BadCall, Refusals, nested

X, W = torch.ones(2, 4), torch.ones(4)
NESTED = nested(X)
DENSE = "to be a dense (strided) tensor, but got a nested one"
layer_norm = Refusals("allfinite::layer_norm", allfinite.layer_norm)
rms_norm = Refusals("allfinite::rms_norm", allfinite.rms_norm)
add_layer_norm = Refusals("allfinite::add_layer_norm", allfinite.add_layer_norm)


def of_every_norm(bad: Refusals) -> list[BadCall]:
    return [
        bad("none", None, (4,)).raises(TypeError, "expected input to be a tensor, but got none"),
        bad("integers", X.long(), (4,)).raises(
            TypeError, "expected input to be float16, bfloat16, float32 or float64, but got Long"
        ),
        bad("complex", X.to(torch.complex64), (4,)).raises(
            TypeError, "expected input to be float16, bfloat16, float32 or float64, but got ComplexFloat"
        ),
        bad("sparse", X.to_sparse(), (4,)).raises(
            NotImplementedError, "expected input to be a dense (strided) tensor, but got layout Sparse"
        ),
        bad("no shape", X, ()).raises(ValueError, "expected normalized_shape of at least one dimension, but got []"),
        bad("wrong shape", X, (5,)).raises(
            ValueError, "expected input to end in normalized_shape [5], but got input of shape [2, 4]"
        ),
        bad("longer shape", X, (1, 2, 4)).raises(
            ValueError, "expected input to end in normalized_shape [1, 2, 4], but got input of shape [2, 4]"
        ),
        bad("scalar input", torch.ones(()), (1,)).raises(
            ValueError, "expected input to end in normalized_shape [1], but got input of shape []"
        ),
        bad("weight's dtype", X, (4,), W.half()).raises(
            TypeError, "expected weight of input's dtype, Float, or float32 beside a 16-bit input, but got Half"
        ),
        bad("the other 16 bits", X.half(), (4,), W.bfloat16()).raises(
            TypeError, "expected weight of input's dtype, Half, or float32 beside a 16-bit input, but got BFloat16"
        ),
        bad("devices", X, (4,), W.to("meta")).raises(
            RuntimeError, "expected weight on the device of input, cpu, but got meta"
        ),
        bad("sparse weight", X, (4,), W.to_sparse()).raises(
            NotImplementedError, "expected weight to be a dense (strided) tensor, but got layout Sparse"
        ),
        bad("negative eps", X, (4,), eps=-1.0).raises(ValueError, "expected eps >= 0 and finite, but got -1"),
        bad("NaN eps", X, (4,), eps=float("nan")).raises(ValueError, "expected eps >= 0 and finite, but got nan"),
        bad("infinite eps", X, (4,), eps=float("inf")).raises(ValueError, "expected eps >= 0 and finite, but got inf"),
        bad("nested", NESTED, (4,)).raises(NotImplementedError, f"expected input {DENSE}"),
        bad("nested weight", X, (4,), NESTED).raises(NotImplementedError, f"expected weight {DENSE}"),
        bad("weight's shape", X, (4,), torch.ones(3)).raises(ValueError, "expected weight of shape [4], but got [3]"),
        bad("weight's dimensions", X, (4,), torch.ones(1, 4)).raises(
            ValueError, "expected weight of shape [4], but got [1, 4]"
        ),
    ]


def of_every_sum(bad: Refusals) -> list[BadCall]:
    return [
        bad("input none", None, X, (4,)).raises(TypeError, "expected input to be a tensor, but got none"),
        bad("integers", X.long(), X, (4,)).raises(
            TypeError, "expected input to be float16, bfloat16, float32 or float64, but got Long"
        ),
        bad("sparse", X.to_sparse(), X, (4,)).raises(
            NotImplementedError, "expected input to be a dense (strided) tensor, but got layout Sparse"
        ),
        bad("no shape", X, X, ()).raises(ValueError, "expected normalized_shape of at least one dimension, but got []"),
        bad("wrong shape", X, X, (5,)).raises(
            ValueError, "expected input to end in normalized_shape [5], but got input of shape [2, 4]"
        ),
        bad("residual none", X, None, (4,)).raises(TypeError, "expected residual to be a tensor, but got none"),
        bad("residual's shape", X, torch.ones(4), (4,)).raises(
            ValueError, "expected residual of input's shape, [2, 4], but got [4]"
        ),
        bad("residual to broadcast", X, torch.ones(1, 4), (4,)).raises(
            ValueError, "expected residual of input's shape, [2, 4], but got [1, 4]"
        ),
        bad("narrow residual", X, X.half(), (4,)).raises(
            TypeError, "expected residual of input's dtype, Float, or float32 beside a 16-bit input, but got Half"
        ),
        bad("wide residual", X.half(), X.double(), (4,)).raises(
            TypeError, "expected residual of input's dtype, Half, or float32 beside a 16-bit input, but got Double"
        ),
        bad("the other 16 bits", X.half(), X.bfloat16(), (4,)).raises(
            TypeError, "expected residual of input's dtype, Half, or float32 beside a 16-bit input, but got BFloat16"
        ),
        bad("integer residual", X, X.long(), (4,)).raises(
            TypeError, "expected residual of input's dtype, Float, or float32 beside a 16-bit input, but got Long"
        ),
        bad("residual's device", X, X.to("meta"), (4,)).raises(
            RuntimeError, "expected residual on the device of input, cpu, but got meta"
        ),
        bad("sparse residual", X, X.to_sparse(), (4,)).raises(
            NotImplementedError, "expected residual to be a dense (strided) tensor, but got layout Sparse"
        ),
        bad("weight's shape", X, X, (4,), torch.ones(3)).raises(
            ValueError, "expected weight of shape [4], but got [3]"
        ),
        bad("weight's dtype", X, X, (4,), W.half()).raises(
            TypeError, "expected weight of input's dtype, Float, or float32 beside a 16-bit input, but got Half"
        ),
        bad("weight's device", X, X, (4,), W.to("meta")).raises(
            RuntimeError, "expected weight on the device of input, cpu, but got meta"
        ),
        bad("negative eps", X, X, (4,), eps=-1.0).raises(ValueError, "expected eps >= 0 and finite, but got -1"),
        bad("NaN eps", X, X, (4,), eps=float("nan")).raises(ValueError, "expected eps >= 0 and finite, but got nan"),
        bad("nested", X, NESTED, (4,)).raises(NotImplementedError, f"expected residual {DENSE}"),
    ]


CASES = [
    *of_every_norm(layer_norm),
    layer_norm("bias's shape", X, (4,), W, torch.ones(1, 4)).raises(
        ValueError, "expected bias of shape [4], but got [1, 4]"
    ),
    layer_norm("bias's dtype", X.half(), (4,), W.half(), W.double()).raises(
        TypeError, "expected bias of input's dtype, Half, or float32 beside a 16-bit input, but got Double"
    ),
    *of_every_norm(rms_norm),
    *of_every_sum(add_layer_norm),
    add_layer_norm("bias's shape", X, X, (4,), W, torch.ones(1, 4)).raises(
        ValueError, "expected bias of shape [4], but got [1, 4]"
    ),
    add_layer_norm("bias's dtype", X.half(), X.half(), (4,), None, W.double()).raises(
        TypeError, "expected bias of input's dtype, Half, or float32 beside a 16-bit input, but got Double"
    ),
    *of_every_sum(Refusals("allfinite::add_rms_norm", allfinite.add_rms_norm)),
]
