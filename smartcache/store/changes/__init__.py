"""What is done to a user's file: each operation with its finish after a crash and its undo."""
