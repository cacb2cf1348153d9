"""What every stage call needs: configuration, fingerprints, execution, tracking and errors."""
