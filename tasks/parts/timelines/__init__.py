"""Where the time of an inference or of a training goes, as a trace that Perfetto opens."""
