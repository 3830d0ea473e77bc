"""Tiles: what a program of a kernel computes, which of them are possible, which a product takes."""
