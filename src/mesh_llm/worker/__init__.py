"""What this node lends to plans that other nodes host."""
