"""Real processes that start fast: forked from a server that has imported the slow packages once."""

import multiprocessing

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.buffers.responses", "torch.distributed.checkpoint"])
