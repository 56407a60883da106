"""Bad input of the ops that write in place, and of what reads gradients: not a byte may change before the refusal."""

import torch
from torch import Tensor

import allfinite
from bad_calls.case import Refusals

INF, NAN = float("inf"), float("nan")
FLOATS = "to be floating-point or complex, but got"
SPARSE = "to be a dense (strided) tensor, but got layout Sparse; pass the values of its coalesced form"
META = torch.ones(2, device="meta")


def grads(*last: Tensor) -> list[Tensor]:
    """Two gradients that would change if anything did, and what follows them."""
    return [torch.tensor([INF, 3.0]), torch.full((4,), 5.0, dtype=torch.float16), *last]


def zero() -> Tensor:
    return torch.zeros(())


def half() -> Tensor:
    return torch.tensor(0.5)


def owners(*last: Tensor) -> list[Tensor]:
    """Parameters whose gradients are finite and long, so that they would be clipped, and one with ``last``."""
    made = [torch.zeros_like(grad).requires_grad_() for grad in (torch.ones(3), *last)]
    for owner, grad in zip(made, (torch.full((3,), 7.0), *last), strict=True):
        owner.grad = grad
    return made


unscale = Refusals("allfinite::unscale_and_check_", allfinite.unscale_and_check_)
UNSCALE = [
    unscale("integers", grads(torch.ones(2).long()), zero(), half()).raises(
        TypeError, f"expected grads[2] {FLOATS} Long"
    ),
    unscale("bools", grads(torch.ones(2).bool()), zero(), half()).raises(TypeError, f"expected grads[2] {FLOATS} Bool"),
    unscale("float8", grads(torch.ones(2).to(torch.float8_e5m2)), zero(), half()).raises(
        TypeError, f"expected grads[2] {FLOATS} Float8_e5m2"
    ),
    unscale("device", grads(META), zero(), half()).raises(
        RuntimeError, "expected grads[2] on the device of found_inf, cpu, but got meta"
    ),
    unscale("sparse", grads(torch.eye(2).to_sparse()), zero(), half()).raises(
        NotImplementedError, f"expected grads[2] {SPARSE}"
    ),
    unscale("found_inf's dtype", grads(), zero().double(), half()).raises(
        TypeError, "expected found_inf to be Float, but got Double"
    ),
    unscale("two found_inf", grads(), torch.zeros(2), half()).raises(
        ValueError, "expected found_inf of one element, but got shape [2]"
    ),
    unscale("no found_inf", grads(), torch.zeros(0), half()).raises(
        ValueError, "expected found_inf of one element, but got shape [0]"
    ),
    unscale("inv_scale's dtype", grads(), zero(), half().half()).raises(
        TypeError, "expected inv_scale to be Float, but got Half"
    ),
    unscale("three inv_scale", grads(), zero(), torch.ones(3)).raises(
        ValueError, "expected inv_scale of one element, but got shape [3]"
    ),
    unscale("inv_scale's device", grads(), zero(), half().to("meta")).raises(
        RuntimeError, "expected inv_scale on the device of found_inf, cpu, but got meta"
    ),
    unscale("part of a graph", grads(torch.ones(2, requires_grad=True) * 2), zero(), half()).raises(
        NotImplementedError,
        "expected tensors without gradient or torch.no_grad(), because a write in place is not differentiable here, "
        "but got one that requires grad",
    ),
]
_SHARED = torch.ones(8)
UNSCALE += [
    unscale("shared memory", grads(_SHARED[:4].view(torch.float16), _SHARED), zero(), half()).raises(
        ValueError,
        "expected entries that share memory to share whole numbers of one dtype, but got entries that overlap "
        "otherwise",
    ),
]

stats = Refusals("allfinite::grad_stats", allfinite.grad_stats)
STATS = [
    stats("integers", grads(torch.ones(2).int())).raises(TypeError, f"expected grads[2] {FLOATS} Int"),
    stats("bools", grads(torch.ones(2).bool())).raises(TypeError, f"expected grads[2] {FLOATS} Bool"),
    stats("device", grads(META)).raises(RuntimeError, "expected grads[2] on the device of grads[0], cpu, but got meta"),
    stats("sparse", grads(torch.eye(2).to_sparse())).raises(NotImplementedError, f"expected grads[2] {SPARSE}"),
]


def update(name: str, **changes: object):
    """``update_scale_`` after an overflow: scale and tracker would both change."""
    arguments = {"scale": torch.tensor(8.0), "growth_tracker": torch.tensor(3).int(), "found_inf": torch.tensor(1.0)}
    return Refusals("allfinite::update_scale_", allfinite.update_scale_)(name, **{**arguments, **changes})


UPDATE = [
    update("scale's dtype", scale=torch.tensor(8.0).double()).raises(
        TypeError, "expected scale to be Float, but got Double"
    ),
    update("two scales", scale=torch.ones(2)).raises(ValueError, "expected scale of one element, but got shape [2]"),
    update("sparse scale", scale=torch.ones(1).to_sparse()).raises(
        NotImplementedError, "expected scale to be a dense (strided) tensor, but got layout Sparse"
    ),
    update("tracker's dtype", growth_tracker=torch.tensor(3)).raises(
        TypeError, "expected growth_tracker to be Int, but got Long"
    ),
    update("two trackers", growth_tracker=torch.ones(2).int()).raises(
        ValueError, "expected growth_tracker of one element, but got shape [2]"
    ),
    update("found_inf's dtype", found_inf=torch.tensor(True)).raises(
        TypeError, "expected found_inf to be Float, but got Bool"
    ),
    update("two found_inf", found_inf=torch.zeros(2)).raises(
        ValueError, "expected found_inf of one element, but got shape [2]"
    ),
    update("no found_inf", found_inf=torch.zeros(0)).raises(
        ValueError, "expected found_inf of one element, but got shape [0]"
    ),
    update("found_inf's device", found_inf=zero().to("meta")).raises(
        RuntimeError, "expected found_inf on the device of scale, cpu, but got meta"
    ),
    *(
        update(f"growth_factor {value}", growth_factor=value).raises(
            ValueError, f"expected growth_factor >= 1 and finite, but got {value}"
        )
        for value in (0.5, NAN, INF)
    ),
    *(
        update(f"backoff_factor {value}", backoff_factor=value).raises(
            ValueError, f"expected 0 < backoff_factor <= 1, but got {value:g}"
        )
        for value in (0.0, -0.5, 1.5, NAN)
    ),
    update("growth_interval", growth_interval=0).raises(ValueError, "expected growth_interval >= 1, but got 0"),
    *(
        update(f"{name} {value}", **{name: value}).raises(
            ValueError, f"expected {name} between 2^-126 and 2^126, but got {value:g}"
        )
        for name, value in (("min_scale", 0.0), ("min_scale", NAN), ("max_scale", INF), ("max_scale", -1.0))
    ),
    update("floor above cap", max_scale=0.5).raises(ValueError, "expected min_scale <= max_scale, but got 1 and 0.5"),
]

norm = Refusals("allfinite::get_total_norm", torch.ops.allfinite.get_total_norm)
scale_down = Refusals("allfinite::clip_grads_with_norm_", torch.ops.allfinite.clip_grads_with_norm_)
clip = Refusals("allfinite::clip_grad_norm_", allfinite.clip_grad_norm_)
# Within it the norm is taken first, by an op that is public, too, and names itself.
clip_norm = Refusals("allfinite::get_total_norm", allfinite.clip_grad_norm_)
FIVE = torch.tensor(5.0).double()
CLIP = [
    norm("order 0", grads(), 0.0).raises(ValueError, "expected norm_type > 0, but got 0"),
    norm("negative order", grads(), -INF).raises(ValueError, "expected norm_type > 0, but got -inf"),
    norm("NaN order", grads(), NAN).raises(ValueError, "expected norm_type > 0, but got nan"),
    norm("integers", grads(torch.ones(2).long())).raises(TypeError, f"expected tensors[2] {FLOATS} Long"),
    norm("device", grads(META)).raises(
        RuntimeError, "expected tensors[2] on the device of tensors[0], cpu, but got meta"
    ),
    norm("sparse", grads(torch.eye(2).to_sparse())).raises(NotImplementedError, f"expected tensors[2] {SPARSE}"),
    scale_down("negative", grads(), -1.0, FIVE).raises(ValueError, "expected max_norm >= 0, but got -1"),
    scale_down("NaN", grads(), NAN, FIVE).raises(ValueError, "expected max_norm >= 0, but got nan"),
    scale_down("two norms", grads(), 1.0, torch.ones(2)).raises(
        ValueError, "expected total_norm of one element, but got shape [2]"
    ),
    scale_down("integers", grads(torch.ones(2).long()), 1.0, FIVE).raises(
        TypeError, f"expected grads[2] {FLOATS} Long"
    ),
    scale_down("device", grads(META), 1.0, FIVE).raises(
        RuntimeError, "expected grads[2] on the device of total_norm, cpu, but got meta"
    ),
    scale_down("sparse", grads(torch.eye(2).to_sparse()), 1.0, FIVE).raises(
        NotImplementedError, f"expected grads[2] {SPARSE}"
    ),
    clip("negative", owners(), -1.0).raises(ValueError, "expected max_norm >= 0, but got -1.0"),
    clip("NaN", owners(), NAN).raises(ValueError, "expected max_norm >= 0, but got nan"),
    clip("not finite", owners(torch.tensor([INF])), 1.0, error_if_nonfinite=True).raises(
        RuntimeError, "expected a finite norm of order 2.0, but got inf; nothing was clipped"
    ),
    clip_norm("clip: order", owners(), 1.0, 0).raises(ValueError, "expected norm_type > 0, but got 0"),
    clip_norm("clip: negative order", owners(), 1.0, -INF).raises(ValueError, "expected norm_type > 0, but got -inf"),
    clip_norm("clip: sparse", owners(torch.eye(2).to_sparse()), 1.0).raises(
        NotImplementedError, f"expected tensors[1] {SPARSE}"
    ),
]

CASES = [*UNSCALE, *STATS, *UPDATE, *CLIP]
