"""Model folders of other programs: found, scanned, and freed of duplicates in place."""
