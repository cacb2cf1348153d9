"""Enginewright: the stages of the pipeline, one plain function a file, free of any orchestrator."""
