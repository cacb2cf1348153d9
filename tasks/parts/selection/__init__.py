"""Select the engine to deploy: verdicts, reports, bundles."""
