"""The HTTP front end: validates, submits, answers and streams; it never touches torch."""
