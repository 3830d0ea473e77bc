"""Interchangeable ways to compute; `table.py` lists them, `select.py` chooses."""
