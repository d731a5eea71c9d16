"""Exact truth for continuous flows, and checks of any implementation against it: `python -m oracle`."""
