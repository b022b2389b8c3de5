"""fusequeue side by side with general model servers, on one pipeline and one load."""
