"""Bytes on this disk: a content-addressed store of read-only, hard-linked blobs."""
