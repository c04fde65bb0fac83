"""NumPy adapter: the array verbs that the other frameworks are tested against."""
