"""Programs as users write them, each of which must train as it does with dense averaging."""
