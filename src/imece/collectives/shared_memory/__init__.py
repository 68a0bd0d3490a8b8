"""The torch.distributed backend "shm": CPU ranks of one host, over memory that all of them map."""

from imece.collectives.shared_memory.arena import shared_empty
from imece.collectives.shared_memory.group import SharedMemoryGroup

__all__ = ["SharedMemoryGroup", "shared_empty"]
