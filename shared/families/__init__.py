"""What the class names of each model family decide: a module per family, with one `FAMILY`, found by the registry."""
