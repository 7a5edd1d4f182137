"""Which block is in use by what. Imports no Paddle, knows no scheduler."""
