"""NSA against full attention in training: plans, runs, results, statistics, targets, and the pages made of them."""
