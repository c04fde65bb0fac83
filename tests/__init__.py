"""The tests. The folders are those of the package; `harness` is shared, `parallel` needs ranks, `project` is the rest."""
