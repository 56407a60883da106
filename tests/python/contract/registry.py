"""Every op under the contract."""

from contract import attention, gradients, norms, update_scale
from contract.base import OpContract

CONTRACTS: tuple[OpContract, ...] = (
    norms.LAYER_NORM.contract,
    norms.RMS_NORM.contract,
    norms.ADD_LAYER_NORM.contract,
    norms.ADD_RMS_NORM.contract,
    attention.ATTENTION,
    gradients.UNSCALE,
    gradients.GRAD_STATS,
    update_scale.UPDATE_SCALE,
)
