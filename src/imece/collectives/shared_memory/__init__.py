"""The torch.distributed backend "shm": CPU ranks of one host, over memory that all of them map.

segment, arena                shared memory, and tensors in it
board, futex                  words that a rank writes and the others read; ordering and sleeping
group, direct, group_base     the calls that torch makes, those that imece makes, and what both stand on
other_devices                 a GPU's tensors in such a group
engine                        the collectives, as generators over the board
small, reducing, exchanging   the ways of a collective
arithmetic, tensors           what a reduction computes; tensors as flat memory
messages, posted              point to point; sums that ranks make for each other
runner, waiting, work         who drives operations, how a rank waits, and the handle of an operation
"""

from imece.collectives.shared_memory.arena import shared_empty
from imece.collectives.shared_memory.group import SharedMemoryGroup

__all__ = ["SharedMemoryGroup", "shared_empty"]
