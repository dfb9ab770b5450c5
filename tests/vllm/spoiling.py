"""A worker that loads other weights than it was sent, for the tests of refusals."""

import os
from pathlib import Path

from vllm.distributed import get_tensor_model_parallel_rank

from rzero.collectors.vllm_worker import WorkerExtension

ORDER = "RZERO_TEST_SPOIL"  # a file; while it exists, worker 1 alone spoils the tensor that it names


class SpoilingExtension(WorkerExtension):
    def _rzero_reload(self, weights):
        order = Path(os.environ[ORDER])
        if get_tensor_model_parallel_rank() == 1 and order.exists():
            name = order.read_text()
            order.unlink()
            if name == "crash":
                raise OSError("worker 1 cannot load")
            weights = {**weights, name: weights[name] + 1}
        super()._rzero_reload(weights)
