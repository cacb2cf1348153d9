"""Which engine ships, and why: verdicts, pages, bundles."""
