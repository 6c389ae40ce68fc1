"""Packs, what a process knows of them, reading and writing. Nothing outside `artifacts` uses it."""
