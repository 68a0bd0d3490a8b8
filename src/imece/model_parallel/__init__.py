"""One model over several ranks: its sequences, its matrices or its layers are divided among them."""
