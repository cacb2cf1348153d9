"""Log measured candidates to MLflow and find them again. No other code talks to MLflow."""
