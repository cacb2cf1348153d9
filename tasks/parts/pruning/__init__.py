"""What is removed from a network, and how it recovers."""
