"""What operators see of a worker: metrics, its HTTP port, the GPU, the pod deletion cost."""
