"""What the class names of models decide: the types of this data, and the tables of all families."""
