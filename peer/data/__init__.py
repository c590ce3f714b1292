"""Training data: a corpus as tokens, and the order in which a peer reads them."""
