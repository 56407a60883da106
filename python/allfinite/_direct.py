"""Calls of the ops that skip what only other callers than eager code need.

``torch.ops.allfinite.<op>`` boxes every argument, which costs 2 to 3 us a call: as much as a small op itself. The same
function of ``_C`` goes to the dispatcher at once, so autograd, autocast and functorch see it as ever. Where somebody
looks at calls from Python (``torch.compile``, dispatch modes, ``__torch_function__``), the op itself is called; also
where an argument has a type that the short cut does not take, since the op knows how to say so.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.overrides import has_torch_function

_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


def direct(short_cut: Callable[..., Any], op: Any, keywords: Sequence[str] = ()) -> Callable[..., Any]:
    """A function of positional arguments that goes through ``short_cut`` if it may, else through ``op``.

    Args:
        short_cut: the function in ``_C``.
        op: the op in ``torch.ops.allfinite``.
        keywords: names of the last arguments, where the op takes them by name only.
    """
    positional = -len(keywords) or None

    def call(*arguments: Any) -> Any:
        if not (is_dynamo_compiling() or _dispatch_modes() or has_torch_function(arguments)):
            try:
                return short_cut(*arguments)
            except TypeError:
                pass  # called again below, outside of this handler, for a message with one cause
        return op(
            *arguments[:positional], **dict(zip(keywords, arguments[positional:] if keywords else (), strict=True))
        )

    return call
