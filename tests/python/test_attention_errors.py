"""What the argument parser refuses of attention, and the generator; bad arguments: bad_calls/attention.py."""

import pytest
import torch

import allfinite

Q = torch.zeros(2, 4, 5, 8)
K = torch.zeros(2, 4, 7, 8)


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
