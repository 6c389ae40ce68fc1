"""Artifacts: computed tensors and plain values, kept once and read back at memory speed."""
