"""The page at `/`: its files, and the few requests that only it makes."""
