"""``convert(model)``: the modules of an existing model, swapped in place for their finite counterparts.

What is swapped:

* ``torch.nn.LayerNorm``, ``RMSNorm``, ``MultiheadAttention``, ``Softmax`` and ``CrossEntropyLoss``, and subclasses of
  theirs that keep ``forward``;
* layer norms and RMS norms of timm, transformers and others, by duck type: see ``norms.py`` for the rule, which ends
  in trial runs against the module's own ``forward``;
* attention modules in timm's shape (``qkv``, ``proj``, ``num_heads``), by duck type: see ``split_attention.py`` for the
  rule, which ends in a trial, too.

How: the module object stays, its class changes to one that differs in ``forward`` alone. So everything that belongs to
the object stays by nature: parameters, buffers, submodules and their hooks, its own hooks, names in the state dict,
training flags, and every reference to it (a module that is used twice, an attribute elsewhere, the root itself).
Replacing the object would lose each of these somewhere. ``isinstance`` tests of the former class still hold.

torch's encoder layers compute with the parameters of their submodules, past their ``forward``, when they run in eval
mode without gradients; ``convert`` turns that path off where it would bypass a swapped module.

Not seen: attention that is written inline in another module's ``forward``, and modules in plain lists or closures.
"""

from allfinite.conversion.convert import convert
from allfinite.conversion.report import ConversionReport

__all__ = ["ConversionReport", "convert"]
