"""Saves and loads files that are either whole and verified or absent."""
