"""What can be wrong with a checkpoint."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be saved or used; no other one is lost by that."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is not what its manifest says."""
