"""AllFinite keeps mixed-precision Transformer training finite.

Fused, numerically safe ops with the names of ``torch.nn.functional``, a ``GradScaler`` with a floor, a cap and a
reason for each skipped step, and ``convert(model)``, which swaps the modules of an existing model.
"""

from allfinite._load import load as _load

_load()

from allfinite import amp, nn, utils  # noqa: E402  (the ops must be registered first)
from allfinite._build_info import VERSION as __version__  # noqa: E402
from allfinite.attention import scaled_dot_product_attention  # noqa: E402
from allfinite.clip_grad import clip_grad_norm_  # noqa: E402
from allfinite.conversion import ConversionReport, convert  # noqa: E402
from allfinite.gradients import GradStats, grad_stats, unscale_and_check_, update_scale_  # noqa: E402
from allfinite.losses import cross_entropy  # noqa: E402
from allfinite.norms import add_layer_norm, add_rms_norm, layer_norm, rms_norm  # noqa: E402
from allfinite.ops import softmax  # noqa: E402

__all__ = [
    "ConversionReport",
    "GradStats",
    "__version__",
    "add_layer_norm",
    "add_rms_norm",
    "amp",
    "clip_grad_norm_",
    "convert",
    "cross_entropy",
    "grad_stats",
    "layer_norm",
    "nn",
    "rms_norm",
    "scaled_dot_product_attention",
    "softmax",
    "unscale_and_check_",
    "update_scale_",
    "utils",
]
