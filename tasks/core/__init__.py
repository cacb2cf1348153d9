"""How any stage is called: configuration, fingerprint, execution, tracking, errors. Knows no stage by name."""
