"""The kinds of modules."""
