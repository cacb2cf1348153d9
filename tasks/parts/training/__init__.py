"""How a network is trained."""
