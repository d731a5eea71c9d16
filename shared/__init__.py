"""Small modules that the algorithm files share: pure functions and thin adapters."""
