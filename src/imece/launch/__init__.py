"""Outside the ranks: starts them, replaces those that die, and leaves nothing of them behind.

local, hosts/      `imece launch` on one host, and on several; local.py lists the rest
spawn              `imece.spawn`: a function on several ranks, from Python
slurm              launchers as the tasks of a SLURM job
drill              faults at random instants
"""
