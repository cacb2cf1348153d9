"""Find the layers at which an engine deviates from the network."""
