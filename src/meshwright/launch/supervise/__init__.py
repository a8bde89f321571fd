"""Starting, watching, restarting and ending ranks, and saying what ended them."""
