"""Where along its layers an engine departs from the network."""
