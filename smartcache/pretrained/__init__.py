"""Models and pipelines out of the store: loaded by their own libraries, equal parts only once.

No download function is patched and no selection rule is copied: known blobs are lent to the repo's
cache, the library runs and chooses, and what it fetched is proven and shared afterwards.
"""
