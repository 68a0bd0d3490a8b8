"""What the host allows this process, and what imece asks of it: cores, memory, open files, connections,
addresses."""
