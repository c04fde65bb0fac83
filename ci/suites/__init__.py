"""What puts the exchange into suites of tests that were written elsewhere, one file for each; ci/outside.py runs them."""
