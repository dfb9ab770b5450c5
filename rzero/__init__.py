"""rzero: composable primitives for asynchronous reinforcement learning of language models.

Four kinds of primitives, each importable alone: ``rzero.losses``, ``rzero.buffers``, ``rzero.collectors`` and
``rzero.kernels``. Importing this package imports none of them.
"""

__version__ = "0.1.0"
