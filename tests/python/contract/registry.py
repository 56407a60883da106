"""Every op under the contract."""

from contract import attention, clip_grad_norm, cross_entropy, gradients, norms, softmax, update_scale
from contract.base import OpContract

CONTRACTS: tuple[OpContract, ...] = (
    norms.LAYER_NORM.contract,
    norms.RMS_NORM.contract,
    norms.ADD_LAYER_NORM.contract,
    norms.ADD_RMS_NORM.contract,
    softmax.SOFTMAX,
    cross_entropy.CROSS_ENTROPY,
    attention.ATTENTION,
    gradients.UNSCALE,
    gradients.GRAD_STATS,
    clip_grad_norm.CLIP_GRAD_NORM,
    update_scale.UPDATE_SCALE,
)
