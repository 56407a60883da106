"""Modules with the names, arguments and state dicts of ``torch.nn``, over the ops of this package."""

from allfinite.nn.cross_entropy import CrossEntropyLoss
from allfinite.nn.layer_norm import LayerNorm
from allfinite.nn.multihead_attention import MultiheadAttention
from allfinite.nn.rms_norm import RMSNorm
from allfinite.nn.softmax import Softmax

__all__ = ["CrossEntropyLoss", "LayerNorm", "MultiheadAttention", "RMSNorm", "Softmax"]
