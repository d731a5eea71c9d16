"""Adapters by which published code, from a checkout of its user, is held against the oracle."""
