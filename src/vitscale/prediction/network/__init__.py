"""Links between ranks and what collectives cost on them."""
