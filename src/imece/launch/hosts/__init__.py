"""Between the agents of several hosts: who may speak to whom, what they say, and who goes on after a cut.

token         the secret that all hosts of a job hold
handshake     two sides prove that they know it (before that, nothing that comes in is believed)
frames        JSON objects of limited size on a connection
link          one connection between two agents, and its heartbeats
tunnel        the ranks' way to the store where they meet
door, reach   how others come in, and how to come in there
links         all connections of an agent
network       ... in a thread of their own
events        what happens there, as its user sees it
succession    which side of a cut goes on, and who leads it (pure)

agent         all of it together, from the start of a host's launcher to its end; it lists the rest
"""
