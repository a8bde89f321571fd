"""Expert parallelism: sends tokens to the ranks of their experts."""
