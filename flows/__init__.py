"""The only code that imports Prefect or Hydra: configuration, the bridge to cached tasks, the flows."""
