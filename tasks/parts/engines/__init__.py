"""What an engine is, what a target declares, and how an engine runs; one package per runtime."""
