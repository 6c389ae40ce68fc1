"""The model folders of other programs: found, walked, compared, and rid of duplicates."""
