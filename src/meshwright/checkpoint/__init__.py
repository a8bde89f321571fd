"""Saving and loading, so that a file is either whole and verified or not there."""
