"""The interactive page of `plan --serve`, and the static one of `plan --html`."""
