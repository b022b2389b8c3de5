"""Worker metrics: collectors, HTTP port."""
