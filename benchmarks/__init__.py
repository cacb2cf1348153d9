"""Scripts that measure what the documentation claims; each prints a table."""

import tasks.parts.engines  # noqa: F401  # before OpenVINO: it keeps that from sending events
