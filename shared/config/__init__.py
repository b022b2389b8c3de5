"""What operators configure: settings, the models file, batch rules."""
