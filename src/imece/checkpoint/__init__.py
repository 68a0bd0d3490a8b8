"""Checkpoints on disk: written in the background, whole or not there at all, read at any number of ranks.

    step     one optimizer update; a checkpoint is named after the last one that it holds
    tensor   a named array of the whole training state, however many ranks hold it
    piece    the elements [start, stop) of a tensor, flat, as one rank's file has them
    attempt  one call of `Checkpoints.save`; two attempts at one step have different names
    partial  a folder that is being written, or removed; never read

    checkpoints/
      step-00000400/                      appears by a rename, when all that is in it is on the disk
        manifest.json                     which pieces are where, checksums, the state in JSON
        rank-00000.safetensors            the pieces that rank 0 wrote
        rank-00001.safetensors
      step-00000400.old/                  only for the moment in which another one takes its place
      step-00000600.<attempt>.partial/
      left-1/                             of later steps, and not of the job that saves here now
      .ranks/                             what the ranks tell each other (meeting.py)

Nothing that is read here is ever unpickled.

    save, writer, commit, room         a save; one rank's part of it; rank 0's; room on the disk
    load, reading, meeting             reading; by ranks together; how ranks that save find each other
    training_state, weights, full      a model and its optimizers; weights alone; an optimizer on rank 0
    deal, sliced, staged, divided      what each rank writes, of models that are sharded, cut and divided
    kept, numbers, base                what optimizers keep; learning rates; frozen parameters
    manifest, files, names, parts      the format, on the disk
    plain, states                      values as tensors, and as JSON
"""

from imece.checkpoint.deal import Slice
from imece.checkpoint.load import Saved, all_steps, best, newest, open_checkpoint
from imece.checkpoint.save import Checkpoints
from imece.checkpoint.state.full import full_optimizer_state
from imece.checkpoint.state.training_state import TrainingState
from imece.checkpoint.state.weights import Loaded, load_weights

__all__ = [
    "Checkpoints",
    "Loaded",
    "Saved",
    "Slice",
    "TrainingState",
    "all_steps",
    "best",
    "full_optimizer_state",
    "load_weights",
    "newest",
    "open_checkpoint",
]
