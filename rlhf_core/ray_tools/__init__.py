"""The toolkit for Ray actors: `calls` waits for them, `placement` gives them room, `group` makes ranks of them."""
