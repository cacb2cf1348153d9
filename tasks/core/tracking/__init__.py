"""Log measured candidates to MLflow and find them again: the only code that talks to it."""
