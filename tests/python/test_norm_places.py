"""F5 of the norms across sizes: large tensors are written past the caches, middling ones are prefetched."""

import pytest
import torch

import allfinite
from support.bounds import DTYPES, assert_same_bits


def run(x, residual, weight, bias, dy, dsum):
    leaves = [t.detach().requires_grad_() for t in (x, residual)]
    y, total = allfinite.add_layer_norm(*leaves, (x.shape[1],), weight, bias)
    return y.detach(), *torch.autograd.grad((y, total), leaves, (dy, dsum))


# dtype, residual's dtype, row length (1001: rows that are not aligned for the stores past the caches).
CASES = [(dtype, dtype, 1024) for dtype in DTYPES] + [
    (torch.float16, torch.float32, 1024),
    (torch.bfloat16, torch.float32, 1001),
    (torch.float16, torch.float16, 1001),
]


@pytest.mark.parametrize(("dtype", "residual_dtype", "n"), CASES, ids=str)
def test_f5_a_large_tensor_has_the_bits_of_its_rows(dtype, residual_dtype, n):
    """F5: 9 MB and more of each tensor take the path past the caches, 2 MB and 14 kB the two others."""
    rows = 4608
    x, dy = torch.randn(rows, n).to(dtype), torch.randn(rows, n).to(dtype)
    residual, dsum = (torch.randn(rows, n).to(residual_dtype) for _ in range(2))
    weight, bias = torch.randn(n).to(dtype), torch.randn(n).to(dtype)
    whole = run(x, residual, weight, bias, dy, dsum)
    for part in (slice(0, 1000), slice(4601, 4608)):
        alone = run(x[part], residual[part], weight, bias, dy[part], dsum[part])
        for a, b in zip(whole, alone, strict=True):
            assert_same_bits(a[part].contiguous(), b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_f5_plain_norms_of_a_large_tensor(dtype):
    """F5: the loop without a residual is another one."""
    x, dy = torch.randn(4608, 1024).to(dtype), torch.randn(4608, 1024).to(dtype)
    weight = torch.randn(1024).to(dtype)
    for norm in (allfinite.layer_norm, allfinite.rms_norm):
        whole, alone = x.clone().requires_grad_(), x[5:12].clone().requires_grad_()
        y, z = norm(whole, (1024,), weight), norm(alone, (1024,), weight)
        assert_same_bits(y[5:12].detach(), z.detach())
        (dx,), (dz,) = torch.autograd.grad(y, whole, dy), torch.autograd.grad(z, alone, dy[5:12])
        assert_same_bits(dx[5:12], dz)
