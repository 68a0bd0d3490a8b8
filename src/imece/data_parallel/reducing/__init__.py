"""What the reducer (../reducer.py) consists of.

buckets, whole           where gradients lie
leaving, line            in which order buckets leave
way, cap                 how large buckets are, and how they travel
posting, comm_hook       ranks of one host that sum for each other; a user's hook that sums
used, arrivals           which parameters ranks used; in which order gradients came
sharing, older           parameters in several models; gradients of earlier backwards
home, task               autograd's streams and graph tasks
finite, watch, trace     NaN and Inf; the times of a step
in_backward, refusals    optimizers that step in backward; what a backward must not do
"""
