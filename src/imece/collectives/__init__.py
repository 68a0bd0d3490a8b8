"""What moves between ranks: collectives and messages, on any torch backend and on imece's own, "shm".

ops, messages                    the public calls
calls, pending, given_up         how a call is carried out, what async_op=True returns, and how a wait ends
native, reduction                torch's own collectives; what each reduction means for a dtype
in_order                         what a program calls of torch comes behind what it began before
schedules, execute               collectives as lists of sends, receives and sums
over_hosts, hierarchical         calls over hosts, in lanes; their stages are in hierarchical_chunk
wire, wire_formats               in bf16 or int8, summed in fp32
links, link_types, choice, auto  links are measured, then a schedule is chosen
checks, rollcall, companions     calls that do not match are errors; over groups beside the group
fingerprint                      what a call is, in 64 bits and in words
recorder, recording, who_waits   the last calls of each rank; how others read them, and see who waits for whom
texts, mistakes                  texts of all ranks; a user's mistakes on any rank
common_memory                    memory that all ranks of a host share
streams, waited, on_signal       a GPU's streams; seconds in collectives; SIGUSR1
shared_memory/                   the backend "shm"
"""
