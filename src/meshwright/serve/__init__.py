"""The page of `plan --serve`: a question of a browser to one document, which the page draws."""
