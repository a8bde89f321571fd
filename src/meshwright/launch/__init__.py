"""Starting, watching and ending the ranks of a run."""
