"""Looking after HF caches: who has which bytes, what is damaged, removing, carrying elsewhere."""
