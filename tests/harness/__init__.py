"""Servers, processes and fixtures that the tests share."""
