"""Language models, their weights and caches in block formats, that write text."""
