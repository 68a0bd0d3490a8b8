"""Inside a rank: generations, whose state is furthest, the copy of each shard."""
