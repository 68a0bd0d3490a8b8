"""Inside a rank that goes on when others die: generations, the state of whoever is furthest, copies of parts.

steps, arguments              `imece.steps`, the user's loop, and what it is given
carried, modes, draws         the state of a step besides tensors; random draws in it
kept_gradients, unwatched     what rank 0 says beforehand is lost, or not protected
member, beating               this process as a member; that it lives
roster, guarded               what it and the launcher tell each other, and where
recovery, borders             into the next generation, with a state that all ranks share; when they ask
behind, block                 if every rank holds everything: ranks that are behind; what a step has done
copies, copy, offers          if each rank holds a part: second copies of all parts; which are read
streams, pieces, needs        parts between hosts; tensors put together from them; what a rank needs of them
aborting, gpu_errors, where   ends calls that wait on a GPU; errors there; the phase in which a member died
states                        state dicts as text
"""
