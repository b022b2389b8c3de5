"""Worker metrics: collectors, HTTP port, pod deletion cost."""
