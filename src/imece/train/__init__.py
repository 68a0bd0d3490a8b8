"""The main job: a language model from text on disk, in one run folder that any later command goes on from."""
