"""What moves between ranks: collectives and messages, on any torch backend and on imece's own, "shm".

ops, messages           the public calls
calls, pending          how a call is carried out, and what async_op=True returns
schedules, execute      collectives as lists of sends, receives and sums
hierarchical, wire      over hosts; in bf16
links, choice, auto     links are measured, then a schedule is chosen
checks, fingerprint     calls that do not match are errors
recorder, who_waits     the last calls of each rank, and who waits for whom
shared_memory/          the backend "shm"
"""
