"""`python -m nsa.report`: pictures of training runs and measurements, as one HTML page; events for TensorBoard."""
