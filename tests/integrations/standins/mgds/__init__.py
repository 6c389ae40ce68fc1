"""A stand-in for mgds, which is not on PyPI: the members that a caching module meets."""
