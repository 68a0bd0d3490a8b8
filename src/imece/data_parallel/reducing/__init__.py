"""What the reducer (../reducer.py) consists of.

buckets, whole   where gradients lie
leaving, line    in which order buckets leave
way, cap         how large buckets are, and how they travel
posting          ranks of one host that sum for each other
used, arrivals   which parameters ranks used; in which order gradients came
sharing          parameters in several models
home, task       autograd's streams and graph tasks
finite, watch    NaN and Inf; the times of a step
"""
