"""`python tools/report`: pictures of training runs and measurements, as one HTML page."""
