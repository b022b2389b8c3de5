"""Other services' protocols, served by the same queue and engine."""
