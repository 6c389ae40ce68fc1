"""The operating system, in plain words: system calls, filesystems, locks, hashing, SQLite.

Nothing here knows of blobs. Whatever differs from one system to another stands in `kernel` and
`filesystems` alone.
"""
