"""One file an algorithm; each runs as a script and is read top to bottom."""
