"""Inside a rank that goes on when others die: generations, the state of whoever is furthest, copies of parts.

steps             `imece.steps`, the user's loop
member, roster    this process as a member; what the launcher and the ranks tell each other
recovery          into the next generation, with a state that all ranks share
behind, block     if every rank holds everything: ranks that are behind; what an abandoned step has done
copies, copy      if each rank holds a part: second copies of all parts
aborting, where   ends calls that wait on a GPU; the phase in which a member died
"""
