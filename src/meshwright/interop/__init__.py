"""Config files of other training systems, read key by key into Meshwright's. No torch here."""
