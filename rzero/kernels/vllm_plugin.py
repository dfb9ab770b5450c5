"""What vLLM calls in every one of its processes, as pip-installed general plugin ``rzero``.

It does nothing unless the environment variable ``RZERO_VLLM_KERNELS`` names kernels; see
``rzero.kernels.vllm_align`` for what happens then.
"""

import os
from collections.abc import Callable

__all__ = ["ENVIRONMENT", "register"]

ENVIRONMENT = "RZERO_VLLM_KERNELS"


def register() -> Callable[[], None]:
    """Put the kernels that ``RZERO_VLLM_KERNELS`` names under vLLM in this process; repeated calls are one.

    Returns:
        What restores vLLM, for engines made afterwards; nothing to restore where nothing was changed.

    Raises:
        ValueError: If the variable names no kernels of ours.
        RuntimeError: If this is a version of vLLM that was never tried.
    """
    kernels = os.environ.get(ENVIRONMENT, "")
    if kernels:
        from rzero.kernels.vllm_align import align_vllm, aligned_kernels

        if aligned_kernels() is None:
            return align_vllm(kernels)
    return lambda: None
