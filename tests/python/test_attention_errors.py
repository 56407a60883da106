"""Bad input to attention: one sentence with op, argument, what was expected and what came, before any work."""

import math

import pytest
import torch

import allfinite

PREFIX = "allfinite::scaled_dot_product_attention: "
Q = torch.zeros(2, 4, 5, 8)
K = torch.zeros(2, 4, 7, 8)

CASES = [
    (TypeError, {"query": Q.long()}, "expected query to be float16, bfloat16, float32 or float64, but got Long"),
    (TypeError, {"query": None}, "expected query to be a tensor, but got none"),
    (TypeError, {"key": K.half()}, "expected key of query's dtype, Float, but got Half"),
    (TypeError, {"value": K.double()}, "expected value of query's dtype, Float, but got Double"),
    (NotImplementedError, {"key": K.to_sparse()}, "expected key to be a dense (strided) tensor, but got layout Sparse"),
    (RuntimeError, {"key": K.to("meta")}, "expected key on the device of query, cpu, but got meta"),
    (ValueError, {"query": Q[0, 0, 0]}, "expected query of shape (..., length, size), but got [8]"),
    (
        ValueError,
        {"key": K[..., :6]},
        "expected query and key of one size in the last dimension, but got [2, 4, 5, 8] and [2, 4, 7, 6]",
    ),
    (
        ValueError,
        {"value": K[..., :3, :]},
        "expected key and value of one length, but got [2, 4, 7, 8] and [2, 4, 3, 8]",
    ),
    (
        ValueError,
        {"key": K[:, :2]},
        "expected query, key and value whose leading dimensions broadcast, but got [2, 4, 5, 8], [2, 2, 7, 8] and "
        "[2, 4, 7, 8]",
    ),
    (
        ValueError,
        {"key": K[:, :3], "value": K[:, :3], "enable_gqa": True},
        "expected query heads to be a multiple of key heads, but got 4 and 3",
    ),
    (
        ValueError,
        {"key": K[:, :2], "enable_gqa": True},
        "expected key and value of one number of heads, but got 2 and 4",
    ),
    (
        ValueError,
        {"query": Q[0, 0], "key": K[0, 0], "value": K[0, 0], "enable_gqa": True},
        "expected (..., heads, length, size) with enable_gqa, but got [5, 8]",
    ),
    (
        TypeError,
        {"attn_mask": torch.ones(5, 7, dtype=torch.uint8)},
        "expected attn_mask to be bool (True: takes part) or floating (added), but got Byte",
    ),
    (
        ValueError,
        {"attn_mask": torch.zeros(5, 6)},
        "expected attn_mask to broadcast to [2, 4, 5, 7], but got [5, 6]",
    ),
    (
        ValueError,
        {"attn_mask": torch.zeros(3, 2, 4, 5, 7)},
        "expected attn_mask to broadcast to [2, 4, 5, 7], but got [3, 2, 4, 5, 7]",
    ),
    (
        RuntimeError,
        {"attn_mask": torch.zeros(5, 7, device="meta")},
        "expected attn_mask on the device of query, cpu, but got meta",
    ),
    (
        RuntimeError,
        {"attn_mask": torch.zeros(5, 7), "is_causal": True},
        "expected attn_mask or is_causal, but got both",
    ),
    (ValueError, {"dropout_p": -0.1}, "expected dropout_p in [0, 1], but got -0.1"),
    (ValueError, {"dropout_p": 1.5}, "expected dropout_p in [0, 1], but got 1.5"),
    (ValueError, {"dropout_p": math.nan}, "expected dropout_p in [0, 1], but got nan"),
    (ValueError, {"scale": math.nan}, "expected a finite scale, but got nan"),
    (ValueError, {"scale": math.inf}, "expected a finite scale, but got inf"),
    (ValueError, {"softcap": -1.0}, "expected softcap >= 0 and finite, but got -1"),
    (ValueError, {"softcap": math.nan}, "expected softcap >= 0 and finite, but got nan"),
    (
        ValueError,
        {"window": (1,)},
        "expected window to be (left, right), each >= 0, or -1 for unbounded, but got [1]",
    ),
    (
        ValueError,
        {"window": (-2, 0)},
        "expected window to be (left, right), each >= 0, or -1 for unbounded, but got [-2, 0]",
    ),
]


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize(("error", "changed", "message"), CASES, ids=[c[2][:60] for c in CASES])
def test_message(error, changed, message, return_lse):
    """Type and text of the error, the same for both schemas."""
    arguments = {"query": Q, "key": K, "value": K, **changed}
    with pytest.raises(error) as caught:
        allfinite.scaled_dot_product_attention(**arguments, return_lse=return_lse)
    assert str(caught.value).split("\n")[0] == PREFIX + message
    if error is RuntimeError:
        assert type(caught.value) is RuntimeError


def test_other_types_are_torchs_errors():
    """No tensor, a string for a number: TypeError of torch's own argument parser."""
    for changed in ({"key": "none"}, {"dropout_p": "half"}, {"window": (0.5, 1)}):
        with pytest.raises((TypeError, RuntimeError)):
            allfinite.scaled_dot_product_attention(**{"query": Q, "key": K, "value": K, **changed})


def test_refused_before_the_generator_moves():
    """A refused call draws no dropout seed."""
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="broadcast"):
        allfinite.scaled_dot_product_attention(Q, K, K, torch.zeros(5, 6), dropout_p=0.5)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused():
    """A nested tensor, whose sizes cannot be asked for: refused by name."""
    nested = torch.nested.nested_tensor([Q[0, 0]])
    for name, changed in (("query", {"query": nested}), ("attn_mask", {"attn_mask": nested})):
        with pytest.raises(NotImplementedError) as caught:
            allfinite.scaled_dot_product_attention(**{"query": Q, "key": K, "value": K, **changed})
        message = f"expected {name} to be a dense (strided) tensor, but got a nested one"
        assert str(caught.value).split("\n")[0] == PREFIX + message
