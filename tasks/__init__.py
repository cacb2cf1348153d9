"""Enginewright: the stages of the pipeline, one plain function per file, independent of any orchestrator."""
