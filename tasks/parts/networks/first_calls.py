"""Let MKL choose its kernels while one thread calls it.

MKL looks for the kernel of a function of single elements, such as ``exp``, when that is first called. If several
threads call it first at once, one of them can compute with a kernel of less accuracy, in that call alone (PyTorch's
issue 188792). On a Xeon with AVX-512, the same training ended with other weights now and then.
"""

import torch

_FUNCTIONS = (
    *(torch.exp, torch.expm1, torch.log, torch.log1p, torch.log2, torch.log10, torch.sqrt, torch.rsqrt),
    *(
        torch.sin,
        torch.cos,
        torch.tan,
        torch.sinh,
        torch.cosh,
        torch.tanh,
        torch.asin,
        torch.acos,
        torch.atan,
    ),
    *(torch.erf, torch.erfc, torch.erfinv, torch.lgamma),
)
"""The functions of single elements for which torch calls MKL on a CPU."""


def settle_kernels() -> None:
    """Call every function once, for a single element, so that it has its kernel before threads share a call.

    On the CPU also where the networks that are being built have no memory yet (``torch.device("meta")``).
    """
    for dtype in (torch.float32, torch.float64):
        element = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for function in _FUNCTIONS:
            function(element)
