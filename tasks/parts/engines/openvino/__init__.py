"""OpenVINO, on the CPU."""
