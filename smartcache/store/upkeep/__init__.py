"""Looking after a store as a whole: removing, checking, counting, leaving, moving."""
