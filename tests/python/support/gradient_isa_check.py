"""Run as a program, once per instruction set: the gradient ops against plain torch, every dtype, layout and tail."""

import math

import torch

import allfinite
from support import gradients
from support.bounds import assert_same_bits


def check_unscale(dtype: torch.dtype) -> None:
    for n in [*range(70), 1000]:
        t = gradients.random(n, dtype=dtype)
        expected = gradients.unscaled(t, 0.3)
        found = torch.zeros(())
        allfinite.unscale_and_check_([t], found, torch.tensor(0.3))
        assert_same_bits(t, expected)
        assert found == 0
    for view in gradients.LAYOUTS.values():
        t = view(gradients.random(6, 7, 10, dtype=dtype))
        expected = gradients.unscaled(t, 0.3)
        allfinite.unscale_and_check_([t], torch.zeros(()), torch.tensor(0.3))
        assert_same_bits(t, expected)
    for position in range(67):
        for bad in (math.inf, -math.inf, math.nan, torch.finfo(dtype).max):
            t, found = torch.zeros(67, dtype=dtype), torch.zeros(())
            t[position] = bad
            allfinite.unscale_and_check_([t], found, torch.tensor(2.0))
            assert found == 1, (dtype, position, bad)


def check_every_16_bit_pattern(dtype: torch.dtype) -> None:
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    for inv_scale in (2.0, 0.3, 2.0**-16, 3e-5):
        t = patterns.clone()
        allfinite.unscale_and_check_([t], torch.zeros(()), torch.tensor(inv_scale))
        expected = gradients.unscaled(patterns, inv_scale)
        number = ~expected.isnan()
        assert_same_bits(t[number], expected[number])
        assert t[~number].isnan().all()


def check_stats(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).tiny
    for n in [*range(70), 1000]:
        t = gradients.random(n, dtype=dtype)
        t[::5] = 0
        t[1::7] = tiny * 0.75
        stats = allfinite.grad_stats([t])
        exact = gradients.flat64([t])
        assert math.isclose(stats.norm.item(), math.hypot(*exact.tolist()), rel_tol=1e-13), (dtype, n)
        assert stats.amax.item() == (exact.abs().max().item() if n else 0)
        assert stats.zeros.item() == int((exact == 0).sum())
        assert stats.subnormals.item() == gradients.subnormals(t)
        assert stats.found_inf.item() == 0
    for position in range(67):
        for bad in (math.inf, -math.inf, math.nan):
            t = torch.zeros(67, dtype=dtype)
            t[position] = bad
            stats = allfinite.grad_stats([t])
            assert stats.found_inf == 1
            assert stats.norm.isnan() if math.isnan(bad) else stats.norm == math.inf
            assert stats.amax.isnan() if math.isnan(bad) else stats.amax == math.inf


if __name__ == "__main__":
    for real in gradients.REAL:
        check_unscale(real)
        check_stats(real)
        if real.itemsize == 2:
            check_every_16_bit_pattern(real)
