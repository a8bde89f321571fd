"""The page of `plan --serve`: turns a browser's question into a document that the page draws."""
