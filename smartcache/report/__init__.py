"""What is on the disk, who shares it, and what could be freed: figures, text and a page."""
