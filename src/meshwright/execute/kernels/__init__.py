"""How the products and the attention of a block are computed."""
