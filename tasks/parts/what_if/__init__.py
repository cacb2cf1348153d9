"""Changes that would make an engine faster: predicted from its explanation, then built and raced."""
