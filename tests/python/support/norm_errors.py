"""Bad input that every norm refuses alike."""

from collections.abc import Callable

import torch
from torch import Tensor

X, W = torch.ones(2, 4), torch.ones(4)
BadCall = tuple[Callable[[], object], type[Exception], str]


def common_cases(norm: Callable[..., Tensor]) -> dict[str, BadCall]:
    """A call of ``norm``, the type of its error, and the text after the op's name."""
    return {
        "none": (
            lambda: norm(None, (4,)),
            TypeError,
            "expected input to be a tensor, but got none",
        ),
        "integers": (
            lambda: norm(X.long(), (4,)),
            TypeError,
            "expected input to be float16, bfloat16, float32 or float64, but got Long",
        ),
        "complex": (
            lambda: norm(X.to(torch.complex64), (4,)),
            TypeError,
            "expected input to be float16, bfloat16, float32 or float64, but got ComplexFloat",
        ),
        "sparse": (
            lambda: norm(X.to_sparse(), (4,)),
            NotImplementedError,
            "expected input to be a dense (strided) tensor, but got layout Sparse",
        ),
        "no shape": (
            lambda: norm(X, ()),
            ValueError,
            "expected normalized_shape of at least one dimension, but got []",
        ),
        "wrong shape": (
            lambda: norm(X, (5,)),
            ValueError,
            "expected input to end in normalized_shape [5], but got input of shape [2, 4]",
        ),
        "longer shape": (
            lambda: norm(X, (1, 2, 4)),
            ValueError,
            "expected input to end in normalized_shape [1, 2, 4], but got input of shape [2, 4]",
        ),
        "scalar input": (
            lambda: norm(torch.ones(()), (1,)),
            ValueError,
            "expected input to end in normalized_shape [1], but got input of shape []",
        ),
        "weight's dtype": (
            lambda: norm(X, (4,), W.half()),
            TypeError,
            "expected weight of input's dtype, Float, or float32 beside a 16-bit input, but got Half",
        ),
        "the other 16 bits": (
            lambda: norm(X.half(), (4,), W.bfloat16()),
            TypeError,
            "expected weight of input's dtype, Half, or float32 beside a 16-bit input, but got BFloat16",
        ),
        "devices": (
            lambda: norm(X, (4,), W.to("meta")),
            RuntimeError,
            "expected weight on the device of input, cpu, but got meta",
        ),
        "sparse weight": (
            lambda: norm(X, (4,), W.to_sparse()),
            NotImplementedError,
            "expected weight to be a dense (strided) tensor, but got layout Sparse",
        ),
        "negative eps": (
            lambda: norm(X, (4,), eps=-1.0),
            ValueError,
            "expected eps >= 0 and finite, but got -1",
        ),
        "NaN eps": (
            lambda: norm(X, (4,), eps=float("nan")),
            ValueError,
            "expected eps >= 0 and finite, but got nan",
        ),
        "infinite eps": (
            lambda: norm(X, (4,), eps=float("inf")),
            ValueError,
            "expected eps >= 0 and finite, but got inf",
        ),
    }
